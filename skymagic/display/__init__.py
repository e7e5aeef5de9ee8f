"""Text for the user as pure functions of the displayed state, and the notebook as a screen.

A rank's line: `run.run` → `NotebookScreen` (screen) → `Labels` (labels) → `write` (live) → the
notebook's stdout.

text           tables, lines about ranks, and positions in code; pure
inspection     stacks, variables, and values by rank; pure
status         pools, ranks and logs as objects with text, HTML and keys; pure
terminal       open line of a stream, and tqdm's bars as progress; pure
plain_lines    progress as the last line of a terminal, or as lines with pauses between them
labels         lines of several ranks: labelled, in order, open ones redrawn in place
live           front end: detection, writing of text and displays, questions
ipykernel6     output of threads in their own cells, with ipykernel 6.17
controls       a run's line with buttons, as widgets, and messages to them during a cell
panel          a pool as HTML: its ranks as cells coloured by state, and its start
run_line       the progress line of a running cell, and its final line
screen         output of a run, and the progress of shipping and copying
"""
