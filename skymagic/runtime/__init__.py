"""API for code that runs on a rank: its place in the pool, output control, its shard of data.

It needs nothing but the standard library.

info          `instance_info`, participants of a run, and output control: `stdout`, `stderr`,
`silent`
silence       redirection of standard streams at the level of file descriptors
sharding      `shard`: this rank's part of the data
generators    generators that stay on a rank between runs
reporting     `report`: training metrics by step
interruption  `on_interruption`: a hook that runs before a machine is reclaimed
usage         possible bottlenecks: data loading, memory, an idle GPU; the kernel's memory limits
rendezvous    a key-value store of the pool's ranks, for plugins; the rank's active plugins
on_import     libraries adapted when a program imports them; temporary replacement of attributes
"""
