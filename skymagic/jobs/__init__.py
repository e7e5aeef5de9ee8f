"""What can be run: a cell, a shell script, a call of a function, joblib's tasks.

cell        a cell on the ranks: from its text to values by rank, or one error
cloning     names of one rank, copied to others
failures    the one error of a run that did not end well, and what may help
profiles    what --profile leaves: a trace for each rank, its longest operations, and who waited
forwarding  ports of nodes as links here
inspection  where the ranks of a pool are, what they hold, and how its nodes are
script      a shell script on every node, to how it ended there
task        a function with its arguments, on all ranks or on one; a generator's values one by one
workers     a worker pool over ranks: tasks side by side, and joblib's backend
"""

from skymagic.jobs import workers as workers  # puts its backend where the plugin joblib finds it
