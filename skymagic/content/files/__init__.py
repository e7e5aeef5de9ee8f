"""Copying files between the notebook and the nodes: put, get, and one-way folder sync.

Only differences are transferred.

changes      the files that a copy transfers, its progress, and messages on its results
clients      one client per node; all nodes concurrently
copy         put, get and sync: the destination of a source, and downloads from one node
ignore       which files .gitignore leaves out
upload       uploads to all nodes; over the data plane if several lack the same files
"""
