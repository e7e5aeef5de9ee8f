"""The plugin `torch`, and its side on a rank: the process group, freed and formed anew after a failure.

A rank that fails in a step leaves the others blocked in a collective. They are let out without losing their variables:

    unblock      shut down the connected sockets of the group: each blocked call raises at once
    groups       destroy the group, and form a new one of the next generation, on a store of its own
    carryover    put the new group where variables, DDP wrappers and parameter defaults held the old one

plugin       `Plugin` torch: wheels, options, hooks
groups       the default process group of a rank
backends     which backend a group has: decided by rank 0, by what all have posted
devices      the GPU of a rank, and what slows a training down: waiting for batches, a GPU at rest
membership   who is in which group, what its members tell each other before it is used; groups beside the default one
unblock      a rank let out of a collective that will never end: sockets shut down, NCCL aborted
carryover    what hung on the old group, sharded models among it: carried over to the new one, or named as lost
launched     what programs look for that torchrun, accelerate or Lightning would have started
guard        collectives refused where ranks do not take part in the run
"""
