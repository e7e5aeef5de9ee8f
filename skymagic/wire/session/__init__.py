"""Exactly-once sessions over connections that break.

A session joins a notebook and a node's daemon; the agent's streams and TCP connections are channels
inside it. Everything after the handshake is a frame (kind, channel, number, length, data)::

    notebook                                              daemon
    HandshakeRequest (secret, resume, attempt, received) →          a line of JSON
                                        ←   HandshakeReply (boot id, received | error, gone)
    DATA channel 0, number 1            →   lines for the agent
                                        ←   DATA channel 0: output of the agent
    OPEN channel 7 (address, port)      →   connects there
    DATA, WINDOW, EOF, RESET channel 7  ↔   as the sockets at both ends do (WINDOW: more credit)
    ACK (number received)               ↔   50 ms after a frame, each 32 frames,
                                            or after 1 s of silence
    EOF channel 0                       →   closes the agent's input, which ends it
                                        ←   EXIT (status, stderr)
    ACK of the EXIT                     →   removes its run directory
                                        ←   GONE, and the daemon ends

A lost connection (an error, its end, or 4 s without a byte) loses nothing: both ends keep each
frame until it is acknowledged. The notebook reconnects with a higher `attempt`. Both ends exchange
how many frames they have `received`, drop what the other has, and send the rest again, in order. A
number that does not follow the last one ends the connection. Without a connection, TCP sockets are
not read beyond 256 KiB in all, so that their senders wait; the agent's output is kept in full.

A killed notebook has lost its end of the session. Another notebook that knows the secret can take
over: the daemon starts a new session with it, and asks the agent to repeat everything that the
first one knew (`NotebookReplaced`).

Why not TCP alone: a TCP connection dies with a suspended laptop, a changed address, a NAT's timeout
or its sshd. Neither end then knows how much of its data has arrived, and the end may go unnoticed
for minutes. Why not QUIC or mosh, which survive this: they need UDP, and many hosts offer only SSH.
So the session lives above SSH.

frames       the handshake and numbered frames: acknowledgements, retransmission; pure
loop         the event loop of one end: connection, heartbeats, TCP channels with flow control
"""
