"""The torch plugin, and its part on a rank: a process group that recovers from failures.

A rank that fails in a step leaves the others blocked in a collective. They are freed without losing
their variables:

    unblock      shut down the connected sockets of the group: each blocked call raises at once
    groups       destroy the group, and form one of the next generation on a new store
    carryover    replace the old group in variables, DDP wrappers and parameter defaults

plugin       the `Plugin` torch: wheels, options, hooks
groups       the default process group of a rank
backends     choose a group's backend: rank 0 decides from what all ranks have posted
devices      the GPU of a rank; measure what slows training down: slow batches, an idle GPU
membership   verify members of a group before it is used; form subgroups again
unblock      free a rank from a collective that never ends: shut down sockets, abort NCCL
carryover    move models and variables to the new group, or report them as lost
launched     imitate the environment of torchrun, accelerate and Lightning launchers
guard        refuse collectives if some of their ranks do not take part in the run
"""
