"""The Python face: pools as context managers, lazy functions, and the operators that run them.

compute    Compute, @function, gather; find, pools, attach
running_pool  what is done with a pool that runs: cells, tasks, variables, files, logs
places     pools on hosts, or rented and found by their tags: listed and ended from any machine
ending     the end of pools by their place, of those that were left, of all that is rented; machines stopped with their disks
costs      what pools cost, and have cost; what machines can be rented for
logs       what ranks wrote, also of a pool that has ended
notebooks  notebooks as jobs on a pool's head: started, followed, stopped
disk       what skymagic keeps on their disks, and its removal
command    the console command
specs      what a pool is asked for: the keywords of Compute
calls      lazy calls, and the operators @, >> and &
"""
