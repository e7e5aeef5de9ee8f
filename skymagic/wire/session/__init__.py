"""Exactly-once sessions over connections that break: a notebook and a node's daemon, with an agent and TCP channels inside.

What is sent when; everything after the handshake is a frame (kind, channel, number, length, data)::

    notebook                                              daemon
    HandshakeRequest (secret, resume, attempt, received) →          a line of JSON
                                                          ←   HandshakeReply (boot id, received | error, gone)
    DATA channel 0, number 1: lines for the agent         →
                                                          ←   DATA channel 0: what the agent writes
    OPEN channel 7 (address, port)                        →   connects there
    DATA, WINDOW (more credit), EOF, RESET channel 7      ↔   as the sockets at both ends do
    ACK (received so many)                                ↔   50 ms after a frame, each 32 frames, or after 1 s of silence
    EOF channel 0                                         →   closes the agent's input, upon which it ends
                                                          ←   EXIT (status, stderr)
    ACK of the EXIT                                       →   removes its run directory
                                                          ←   GONE, and the daemon ends

A lost connection (an error, its end, or 4 s without a byte) loses nothing: both ends keep each frame until it is acknowledged. The
notebook connects again with a higher `attempt`; both say how many frames they have `received`, drop what the other has, and send
the rest again, in order. A number that does not follow the last one ends the connection. While there is none, TCP sockets are not
read beyond 256 KiB in all, so that their senders wait; the agent's output is kept in full.

A notebook that was killed has lost its end of the session. Another one that knows the secret takes over: the daemon begins a new
session with it, and asks the agent to tell again all that the first one knew (`NotebookReplaced`).

Why not TCP alone: a TCP connection dies with a suspended laptop, a changed address, a NAT's timeout or its sshd, and neither end
knows how much of what it wrote has arrived; and its end may be noticed after minutes only. Why not QUIC or mosh, which survive
this: they need UDP, and all there is on many hosts is SSH. So the session lives above what SSH carries.

frames       the handshake, and numbered frames: sequence numbers, acknowledgements, retransmission; pure
loop         the event loop of one end: connection, heartbeats, TCP sockets in channels with flow control
"""
