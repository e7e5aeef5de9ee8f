"""Jobs that a pool executes: cells, shell scripts, function calls and joblib's tasks.

cell        a cell on the ranks: from its text to values by rank, or one error
cloning     copies of one rank's variables on other ranks
failures    the single error of a failed run, with hints
profiles    output of --profile: a trace for each rank, its longest operations, and waiting ranks
forwarding  ports of nodes as links on this machine
inspection  stacks and variables of ranks, and checks of nodes
script      a shell script on every node, and its exit status on each
task        a function call on all ranks or on one; a generator's values one by one
workers     a worker pool over ranks: parallel tasks, and joblib's backend
"""

from skymagic.jobs import workers as workers  # registers its backend with the joblib plugin
