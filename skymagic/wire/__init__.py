"""Everything that processes send each other: one codec, the messages of each protocol, and the session that carries them.

codec        frozen dataclasses as lines of JSON, with raw bytes behind them; the byte streams that carry them
agent        messages of the node agents: notebook, daemon, agent, forkserver, ranks
store        messages of the value servers
files        messages of copying files
check        messages of checking a node
notebook     messages of a notebook that is a job on the head
metrics      numbers that ranks report, packed
streams      standard output and error of a rank in one pipe
order        what notebook and rank agree on besides: the orders in a run's code
processes    the modules that one process starts in another, signals, boot ids, and how a process ended
record       what an agent writes about itself for logins on its node
atomic       files that are replaced atomically
authentication  connections before their sender is known: bounds, and a challenge–response handshake
tls          byte streams between nodes that know each other by one certificate
sealed       a TLS session in a channel that is not encrypted, and its program on a node
untrusted    text from other machines, made safe to print in a terminal
threads      fork and join: jobs that run at once, and what became of them
session/     exactly-once delivery over connections that break
"""
