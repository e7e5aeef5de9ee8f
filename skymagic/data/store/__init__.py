"""A node's store: files of values, written once and mapped by every rank.

base        what the node's and the remote store share: content addressing, pins, LRU eviction
store       the node's store: a private directory of files, hashed as they are written, mapped privately
bundle      where the parts of values are: the format of a bundle, and the content index
device      memory of a GPU, on its way into host memory
"""
