"""What can be run: a cell, a shell script, a call of a function, joblib's tasks.

cell              a cell on the ranks: from its text to values by rank, or one error
ending            the end of a run, for the line that stays of it
inspection        where the ranks of a pool are, and what they hold, as text
clone             names of one rank copied to others
hints             what may help with an error that ranks have raised
script            a shell script on every node, to how it ended there
notebook          the pool of a kernel that executes a notebook as a job
workdir           the folder of a script, on the nodes
task              a function with its arguments, on all ranks or on one
workers           a worker pool over ranks: tasks side by side
streams           what a generator function yields on the ranks, value by value
joblib_backend    joblib's backend: each batch of its tasks is a task here
"""

from skymagic.jobs import joblib_backend as joblib_backend  # puts itself where the plugin joblib finds it
