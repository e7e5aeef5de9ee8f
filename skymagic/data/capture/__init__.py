"""Find out what a cell needs: the names it reads, their origin, and modules that travel as source.

names             names that a cell reads from the notebook, and those that these need in turn;
                  scripts
dataflow          definite assignment analysis: names that a cell reads before it binds them on
                  every path
code              names in code objects, in strings expanded by IPython and pandas, and in
                  annotations
assignments       changes made by the notebook's cells: assigned names, modules, environment
                  variables
registrations     registrations made by cells that do not travel with a class
class_attributes  attributes that cells set on classes of packages
settings          process-wide settings of packages that cells make
numbering         numbers of cells by the names of their files
executed          nodes that a cell executes: its statements, and functions of the notebook it calls
imports           module names in source: all that it may import, and those that it requires
modules           the user's own modules, with the modules they import and their data files
loaded            modules loaded in the notebook: those behind its names, and those edited since
installed         distributions in this environment, and the modules they provide
"""
