"""The stores of several nodes as one: chain replication out, prefetching back, over connections that may be lost.

The messages of `wire.store`, for a value that two nodes get; ``→`` is the notebook's connection, ``⇢`` between nodes::

    notebook → 0, 1     Settings                   0, 1 → notebook     Ready (port, room, what is there), then Heartbeat every 2 s
    notebook → 1        Replicate (value, 0)       1 ⇢ 0               FollowValue (name, offset)
    notebook → 0        Put, PutChunk…, PutEnd     0 ⇢ 1               ValuePiece…, as they arrive; at the end the key
                                                   0, 1 → notebook     Stored, or StoreFailed: another source is assigned
    notebook → 1        Read (name, offset)        1 → notebook        ReadReply, ReadChunk…

A value of which the nodes have parts, in others, needs only the rest::

    notebook → 0        Put, PutChunk…, PutEnd     the pieces that no node has, as a value of its own; 0 ⇢ 1
    notebook → 0, 1     Assemble (slices)          0, 1 → notebook     Stored, or StoreFailed: all of it is sent

What a node has is in its store under the content's hash, so that everything may be sent again: after a lost connection
the notebook connects again, is told in Ready what is there, and sends what is missing.

client          the connection to one node's value server
clients         the connections to all: opened at once, retried with backoff, told what to unlink
replication     chain replication: values on their way to all nodes, and what is done when that fails
remote_store    the stores of several nodes as one `Store`: pieces of changed files, files that come back from all at once
"""
