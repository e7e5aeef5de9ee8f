"""What the user sees: text as pure functions of what is shown, and the notebook as a screen.

text      lines, labels, tables and stacks; pure, but for the one function that writes
screen    where a run's output is shown, and the progress of shipping and copying
"""
