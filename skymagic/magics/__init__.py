"""The magics: a line becomes a frozen request, one call is made, and the answer is shown.

arguments/    from a line to a request
magics        all magics, registered with one shell
runs          cells and scripts on pools: now or beside the notebook, and the variables that they leave
inspection    pools, where ranks are and what they hold, and %debug on the frames of a rank
beside        a cell that goes on beside the notebook: its handle
completion    tab completion on magic lines
transformers  before each cell: %sky_auto, and misplaced magics; after one that failed: names that are on the ranks
rendering     how the shell shows a rank's error, and lists of values by rank
server_note   a note where the Jupyter server executes the cells itself
config        users' defaults, the one place of traitlets
"""
