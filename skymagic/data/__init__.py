"""The data plane: which names a cell needs, values as bytes, files on a node, what moves to which rank, and many nodes' stores as one."""
