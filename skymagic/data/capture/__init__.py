"""What a cell needs: the names that it reads, where they come from, and modules that travel as source.

names       the names that a cell takes from the notebook, and those that these need in turn
dataflow    definite assignment analysis of a cell: which names it reads before it binds them on every path
scopes      free names of functions, code objects and IPython's templates
modules     modules of the notebook's folder, with those that they import
"""
