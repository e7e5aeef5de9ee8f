"""Python API: pools as context managers, lazy functions, and the operators that run them.

compute       Compute, @function, gather; find, pools, attach
running_pool  methods of a running pool: cells, tasks, variables, files, logs
pool_listing  list pools by location, from any machine: on hosts, in cluster jobs, at EC2 by tag
stopping      end pools by location, pools left by other notebooks, or everything rented
costs         past and current costs of pools; rental prices of machines
logs          output of ranks, also of a pool that has ended
debug_logs    debug logs of skymagic's own processes, collected from all nodes of a pool
positions     where ranks are, read from outside of the notebook that has the pool
mcp_server    tools for coding agents: the Model Context Protocol over standard input and output
notebooks     notebook jobs on a pool's head: start, follow, stop
disk          files of skymagic on the disks of hosts: list and remove
command       the console command
specs         pool requests from the keywords of Compute
calls         lazy calls, and the operators @, >> and &
"""
