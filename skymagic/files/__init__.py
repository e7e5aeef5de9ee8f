"""Copying files between the notebook and the nodes: put, get, and one-way folder sync; only what differs travels.

clients      one client per node; all nodes at once
copy         put, get and sync
destination  where a source goes, by the rules of cp and rsync
gitignore    the patterns of .gitignore
ignore       which files .gitignore leaves out
messages     results and errors in words
transfer/    file entries, comparison, sending and receiving, for both ends
"""
