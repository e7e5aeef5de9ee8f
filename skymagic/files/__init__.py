"""Copying files between the notebook and the nodes: put, get, and one-way folder sync; only what differs travels.

changes      which files travel, and how far they are
clients      one client per node; all nodes at once
copy         put, get and sync
destination  where a source goes, by the rules of cp and rsync
gitignore    the patterns of .gitignore
download     what one node sends
ignore       which files .gitignore leaves out
messages     results and errors in words
multicast    the same files for several nodes, over the data plane
upload       what all nodes get
transfer/    file entries, comparison, sending and receiving, for both ends
"""
