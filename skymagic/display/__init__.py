"""What the user sees: text as pure functions of what is shown, and the notebook as a screen.

A rank's line: `run.run` → `NotebookScreen` (screen) → `Labels` (labels) → `write` (live) → the notebook's stdout.

text           tables, lines about ranks, and places; pure
inspection     what ranks do and hold: stacks, variables, and values by rank; pure
status         pools, ranks and logs as objects with text, HTML and keys; pure
terminal       a stream's open line, and tqdm's bars as progress; pure
labels         lines of several ranks: labelled, in order, open ones redrawn in place
live           the front end: which one there is, text and displays written to it, and questions
controls       a run's line with its buttons, as widgets, and what a front end sends to them amid a cell
panel          a pool as HTML: its ranks as cells coloured by state, and its start
run_line       the line of a running cell, and the one that stays of it
screen         where a run's output is shown, and the progress of shipping and copying
"""
