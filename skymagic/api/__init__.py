"""The Python face: pools as context managers, lazy functions, and the operators that run them.

compute    Compute, @function, gather, find
rented     what is rented, and its end
tagged     the same by its tags alone, from any machine
stopping   rented machines stopped with their disks
running    what of the user's pools runs on hosts, and its end
costs      what pools cost, and have cost
logs       what ranks wrote, also of a pool that has ended
reading    pools of other notebooks, followed from here
notebooks  notebooks as jobs on a pool's head: begun, followed, stopped, taken
executing  what a notebook that is a job shows, in a terminal and in another notebook
papermill  the same as papermill's engine
disk       what skymagic keeps on their disks, and its removal
command    the console command
offers     what machines can be rented for
specs      what a pool is asked for: Spec, Options, Worker
calls      lazy calls, and the operators @, >> and &
"""
