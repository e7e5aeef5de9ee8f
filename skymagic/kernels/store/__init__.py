"""The value server of a node: receives values from the notebook or another node and forwards them.

`content.remote` shows the messages. Received bytes are never unpickled; they are written under a
validated name.

server      the process: handles the notebook's messages; one server per store
adopting    files that the node has already, put into the store
incoming    values being written to the store, which others may read meanwhile
outgoing    messages and files for the notebook: a bounded send queue
"""
