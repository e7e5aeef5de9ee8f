"""The magics: parse a line to a frozen request, make one call, and show the result.

arguments/    parse lines to requests
magics        all magics, registered with one shell
runs          cells and scripts on pools, in the foreground or background, and their output
              variables
inspection    pools, stacks and variables of ranks, and %debug on the frames of a rank
background    handle to a background cell
completion    tab completion on magic lines
transformers  before each cell: %sky_auto and misplaced magics; after a failed cell: names that are
              on the ranks
rendering     display of ranks' errors, and of lists of values by rank
server_note   note for Jupyter servers that execute the cells themselves
config        users' defaults, the only module with traitlets
"""
