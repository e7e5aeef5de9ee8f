"""The stores of several nodes as one: chain replication, prefetching, and lost connections.

The messages of `wire.store`, for a value that two nodes get; ``→`` is the notebook's connection,
``⇢`` between nodes::

    notebook → 0, 1   Settings                  0, 1 → notebook  Ready (port, room, stored files),
                                                                 then Heartbeat every 2 s
    notebook → 1      Replicate (value, 0)      1 ⇢ 0            FollowValue (name, offset)
    notebook → 0      Put, PutChunk…, PutEnd    0 ⇢ 1            ValuePiece…, as they arrive;
                                                                 at the end the key
                                                0, 1 → notebook  Stored, or StoreFailed:
                                                                 another source is assigned
    notebook → 1      Read (name, offset)       1 → notebook     ReadReply, ReadChunk…

If the nodes have parts of a value in other files, only the remaining parts are sent::

    notebook → 0      Put, PutChunk…, PutEnd    the pieces that no node has, as a separate value; 0
        ⇢ 1
    notebook → 0, 1   Assemble (slices)         0, 1 → notebook  Stored, or StoreFailed: all is sent

A node stores each file under its content hash, so that everything may be sent again: after a lost
connection the notebook reconnects, learns from Ready which files are there, and sends the missing
ones.

client        connection to one node's value server
clients       connections to all nodes: opened in parallel, retried with backoff, unlinking
replication   chain replication: values on their way to all nodes, and the handling of failures
remote_store  all stores as one `Store`: pieces of changed files, parallel downloads
bare_hosts    files to hosts without packages, by the same servers
"""
