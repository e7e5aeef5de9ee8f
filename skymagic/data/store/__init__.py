"""Store of one node: files of values, written once and mapped by every rank.

base    shared by the node store and the remote store: content addressing, pins, LRU eviction
store   the node store: a private directory of files, hashed while written, mapped privately
bundle  locations of a value's parts: the bundle format, and the content index
device  memory of a GPU on its way into host memory
"""
