"""The plugin `torch`, and its side on a rank: the process group, freed and formed anew after a failure.

A rank that fails in a step leaves the others blocked in a collective. They are let out without losing their variables:

    unblock      shut down the connected sockets of the group: each blocked call raises at once
    groups       destroy the group, and form a new one of the next generation, on a store of its own
    carryover    put the new group where variables, DDP wrappers and parameter defaults held the old one

plugin       `Plugin` torch: wheels, options, hooks
groups       the default process group of a rank
backends     which backend a group has: decided by rank 0, by what all have posted
devices      the GPU of a rank
membership   who is in a group, and what its members tell each other before it is used
nccl         variables for NCCL, and the abort of all its communicators
unblock      a rank let out of a collective that will never end
subgroups    groups of the user and of device meshes, made again under their names
sharded      FSDP, DTensor and device meshes: put in order after a failure, or named as lost
carryover    what hung on the old group: carried over to the new one, or named as lost
launched     what programs look for that torchrun, accelerate or Lightning would have started
usage        how long the main thread waits for batches, and what the GPU does
guard        collectives refused where ranks do not take part in the run
"""
