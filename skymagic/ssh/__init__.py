"""SSH client connections over paramiko: host names, ~/.ssh/config, host keys, logins, remote processes. All of paramiko is here.

A `HostSpec` is a host as written, an `Endpoint` is it as resolved, a `Connection` is it as connected::

    "me@gpu[1-2]"  hostlist → HostSpec  config → Endpoint  connecting → Connection  connection.open → Process

cancellation  cancellation of connects under way; login slots per sshd
closing       nothing more is sent to a channel that is closed
config        ~/.ssh/config evaluated for a host
connecting    many hosts connected concurrently
connection    one authenticated connection: scripts, processes, uploads
dial          TCP connect with a timeout; keepalive
hostlist      host names and ranges as users write them
keys          the user's private keys: ssh-agent, files, passphrases
known_hosts   known_hosts(5): verification of host keys
login         SSH handshake, host key check, public-key authentication
process       a remote process over one channel
proxy         ProxyJump and ProxyCommand
"""
