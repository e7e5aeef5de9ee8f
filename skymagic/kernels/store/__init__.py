"""A node's value server: values come from the notebook or another node, and are passed on.

The messages are drawn in `data.remote`. Nothing that comes is unpickled: it is bytes, written under a name that leads nowhere else.

server      the process: handles the notebook's messages, one server for each store
incoming    values on their way into the store, which others may read as far as they have come
outgoing    messages and files for the notebook: a bounded send queue
peers       values from node to node, over TLS
"""
