"""What the user sees: text as pure functions of what is shown, and the notebook as a screen.

text      labels, tables and stacks; pure, but for the one function that writes
labels    lines of several ranks: labelled, in order, and open ones redrawn in their place
live      text that changes in its place: displays and status lines
question  yes or no, and no where nobody can answer
button    a line with a stop button, as widgets
screen    where a run's output is shown, and the progress of shipping and copying
"""
