"""What code on a rank calls: where it is, who prints, its shard. Standard library only.

info          `instance_info`, who takes part in a run, and output control: `stdout`, `stderr`, `silent`
silence       redirection of standard streams at the level of file descriptors
sharding      `shard`: this rank's part of data
generators    generators that live on a rank between runs
reporting     `report`: numbers of a training by step
interruption  `on_interruption`: a hook for the time before a machine is taken away
usage         what may slow a rank down: waiting for batches, memory, a GPU at rest; limits that the kernel tells
rendezvous    a key-value store of the pool's ranks, for plugins, and the plugins that run here
on_import     libraries adapted when a program imports them; attributes of theirs replaced
"""
