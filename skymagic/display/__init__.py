"""What the user sees: text as pure functions of what is shown, and the notebook as a screen.

text      labels, tables and stacks; pure
inspection  what ranks do and hold: stacks and variables, those that are alike together
keyed     what objects with keys have in common
logs      what ranks wrote, as an object with text and HTML; pure
results   values by rank as a small table: type, shape or value; pure
labels    lines of several ranks: labelled, in order, and open ones redrawn in their place
folding   equal lines of many ranks as one; pure
live      the front end: what it is, text and displays written to it, and lines that are redrawn in place
question  yes or no, and no where nobody can answer
controls  a run's line with its buttons, as widgets
shell_channel  what is sent to widgets while a cell holds the kernel's main thread
proxies   widgets of ranks in the notebook: passed on in both directions
looking   whether somebody looks at a widget, and what is drawn only then
use       what a rank uses, in words; pure
status    how pools and their ranks are, as an object with text and HTML; pure
panel     a pool as HTML: its ranks as cells coloured by state
starting  a pool's start: lines, or one display that is drawn again
run_line  the line of a running cell, and the one that stays of it; pure
run_view  that line on the screen
bars      tqdm's bars in what ranks print, read as progress; pure
screen    where a run's output is shown, and the progress of shipping and copying
"""
