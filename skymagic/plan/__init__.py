"""From a request to a plan: what users ask for, the units they write it in, and what will run; pure values.

Nothing here touches a machine. A provider describes what there is as an `Inventory`, `plan` answers with a `Plan`
or with every reason why not.

units           durations, amounts and selections of ranks, read and written; numbers and ranks in words
suggest         the nearest name to one that is misspelt
accelerators    accelerators by name
gpus            GPUs of a machine: listed, asked for, given to nodes
masking         what is shown of text that may hold secrets
image           packages, environment and files that ranks need
distributions   distributions by what is imported from them; what a node lacks
requests        a pool, a run or a plugin as it was asked for; how rented machines are reached; the configured defaults
limits          how many ranks a machine has open files for, and when a pool ends by itself
plans           the values of an answer: Topology, Inventory, Plan
planning        from a request to a plan; whether a pool fits a request
renting         the plan of a pool on rented machines, and what is asked before
parameters      parameters of a notebook, as papermill has them
"""
