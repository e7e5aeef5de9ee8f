"""A notebook as a job on its pool's head: executed there cell by cell, reported to any client that asks, and kept until it is fetched.

    client ── start         forks the driver, and ends
              driver        a session of its own, as the daemon of an agent; serves a Unix socket in its run directory
                ├─ kernel   an ipykernel of its own, which has the pool as any notebook has (`jobs.notebook`)
                └─ thread   for each follower
    client ── journal       one for each connection; tells from the files where the driver has ended

start    begins one
driver   executes the cells, and tells of them
journal  what was told, in a file, and the notebook beside it; tells of one, from its driver or from these files
kernel   the kernel that executes the cells, and what it says as the outputs that a notebook keeps
"""
