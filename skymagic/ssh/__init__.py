"""SSH client connections over paramiko: host names, ~/.ssh/config, host keys, logins, remote processes. All of paramiko is here.

A `HostSpec` is a host as written, an `Endpoint` is it as resolved, an `SSHConnection` is it as connected::

    "me@gpu[1-2]"  hostlist → HostSpec  config → Endpoint  connecting → SSHConnection  connection.open → Process

config        ~/.ssh/config evaluated for a host
connecting    many hosts connected concurrently
connection    one authenticated connection: scripts, processes, uploads
dial          streams to an sshd: TCP, ProxyJump, ProxyCommand; cancellation of connects under way, and login slots per sshd
hostlist      host names and ranges as users write them
keys          the user's private keys: ssh-agent, files, passphrases
known_hosts   known_hosts(5): verification of host keys
login         SSH handshake, host key check, public-key authentication
process       a remote process over one channel
"""
