"""A node's store: files of values, written once and mapped by every rank.

base        what the node's and the remote store share: content addressing, pins, LRU eviction
store       the node's store: a private directory of files
writer      a file that is being written, hashed on the way
mmap        private mappings (copy on write) without descriptors
index       the content index: where the parts of values are, and which names need them
device      memory of a GPU, on its way into host memory
bundle      the format of a bundle, the same on the way out and back
"""
