"""Messages between skymagic's processes: codec, protocols, and the sessions that carry them.

codec        frozen dataclasses as lines of JSON, with raw bytes behind them; their byte streams
typed        dataclasses as JSON values, and back, checked against their annotations
agent        messages of the node agents: notebook, daemon, agent, forkserver, ranks
queries      questions to ranks' control threads, and the types of their answers
output       output of ranks, as their agent sends it to the notebook
store        messages of the value servers
files        messages for copying files
check        messages for checking a node
notebook     messages of a notebook that runs as a job on the head
script       a shell script on a node: its order, and its result
debug_log    debug log of a process: one bounded file, written on request
debug_entries  entries of debug logs: find, read, merge by time; messages for reading a node's
metrics      numbers that ranks report, packed
streams      standard output and error of a rank in one pipe
order        requests from the notebook to its ranks, at the top of a run's code
outcome      what a rank replies to an order, and what it remembers of its last run
values       values on the wire: where the parts of a pickle are, and what rebuilding it needs
processes    modules that one process starts in another, signals, boot ids, exit statuses
record       what an agent records about itself for logins on its node
atomic       files that are replaced atomically
authentication  limits on unauthenticated connections, and a challenge-response handshake
tls          byte streams between nodes that recognize each other by one certificate
sealed       a TLS session inside an unencrypted channel, and its program on a node
untrusted    text from other machines, made safe to print in a terminal
threads      run jobs concurrently on threads and collect their results
session/     exactly-once delivery over connections that break
"""
