"""What a cell needs: the names that it reads, where they come from, and modules that travel as source.

names        the names that a cell takes from the notebook, and those that these need in turn
dataflow     definite assignment analysis of a cell: which names it reads before it binds them on every path
branching    names that are met on the paths through a cell
definitions  names that are defined on every path to a place
scopes       free names of functions
bytecode     names in code objects
assignments  the names that the notebook's cells assign, and what they set in modules
environment  what the notebook has changed in its environment
functions    names that a function of the notebook mentions in string literals
strings      names in string literals: code, templates, IPython's calls, keys of the namespace
annotations  names in annotations that are strings
scripts      what the files need that a cell runs with %run
cells        the cells that code comes from, for tracebacks
imports      names of modules in source: all that it may import, and those that it cannot do without
namespace    modules behind the notebook's names
installed    the distributions of this environment, and what is imported from them
modules      the user's own modules, with those that they import
paths        folders of the user's own modules
staleness    modules whose file was edited after the notebook had imported them
resources    data files of a package
"""
