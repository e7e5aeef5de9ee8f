"""Plan a pool: requests of users, units of their values, and the resulting plan; pure values.

Nothing here touches a machine. A provider describes its machines as an `Inventory`; `plan` returns
a `Plan` or raises with every reason why it is impossible.

units           parse and format durations, amounts and selections of ranks
suggest         nearest name to a misspelt one
accelerators    accelerators by name
gpus            GPUs of a machine: list, select, assign to nodes
masking         masking of secrets in text
container       containers of nodes: engine, image, folders
image           packages, environment and files that ranks need
distributions   distributions by import name; distributions that a node lacks
requests        requests for pools, runs and plugins; settings of EC2; configured defaults
limits          open files per rank, and the end of a pool's lifetime
plans           the resulting values: Topology, Inventory, Plan
planning        plan a request; check whether a pool fits a request
renting         plan a pool on rented machines, and the question to confirm it
parameters      notebook parameters, as in papermill
"""
