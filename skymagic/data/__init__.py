"""The data plane: which names a cell needs, values as bytes, files on a node, what moves to which rank, and many nodes' stores as one.

A cell's names (`capture`) are pickled (`values`), put into a store by their content (`store`, `remote`) and described in a
manifest (`shipping`), by which each rank maps and binds them. What comes back goes through a node's store too.

capture/    what a cell needs: names, and modules that travel as source
values/     values as bytes and back
store/      a node's store: files of values, mapped by every rank; the format of bundles
shipping/   in the notebook: what moves to which rank
remote/     in the notebook: the stores of several nodes as one
"""
