"""Copying files between the notebook and the nodes: put, get, and one-way folder sync; only what differs travels.

changes      what a copy changes: counts, progress, results and errors in words
clients      one client per node; all nodes at once
copy         put, get and sync: where a source goes, and what one node sends
ignore       which files .gitignore leaves out
upload       what all nodes get; over the data plane where several lack the same
transfer/    file entries, comparison, sending and receiving, for both ends
"""
