"""Content by hash: one store per node, one transfer between nodes, for values and files.

Content is cut into chunks that are found again by their hashes, so that only missing ones move.
What several nodes lack leaves the notebook once and goes from node to node in a chain.

chunks      cut and hash content; which chunks are present already
base        shared by the node store and the remote store: content addressing, pins, LRU eviction
store       the node store: a private directory of files, hashed while written, mapped privately
device      memory of a GPU on its way into host memory
chain       content from node to node, over TLS
transfer/   files as manifests of content: listing, comparison, sending and receiving, on both ends
remote/     in the notebook: treat the stores of several nodes as one
files/      in the notebook: put, get and sync files
"""
