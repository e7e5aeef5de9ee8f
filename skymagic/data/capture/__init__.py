"""What a cell needs: the names that it reads, where they come from, and modules that travel as source.

names        the names that a cell takes from the notebook, and those that these need in turn; files that it runs
dataflow     definite assignment analysis of a cell: which names it reads before it binds them on every path
code         names in code objects, in the strings that IPython and pandas expand, and in annotations; the cells of code
assignments  what the notebook's cells change: the names that they assign, modules, the environment
registrations  registrations in cells that no class takes along
class_attributes  attributes that cells set on classes of packages
settings     settings of packages that cells make for the whole process
executed     what a cell executes: its statements, and the functions of the notebook that it calls
imports      names of modules in source: all that it may import, and those that it cannot do without
modules      the user's own modules, with those that they import and their data files
loaded       modules that the notebook has loaded: behind its names, and edited since
installed    the distributions of this environment, and what is imported from them
"""
