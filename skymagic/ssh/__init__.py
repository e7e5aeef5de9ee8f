"""Shells on other hosts: SSH connections over paramiko (all of which is here) or OpenSSH's client, and the channels that lead elsewhere.

A `HostSpec` is a host as written, an `Endpoint` is it as resolved, an `SSHConnection` is it as connected::

    "me@gpu[1-2]"  hostlist → HostSpec  config → Endpoint  connecting → SSHConnection  HostConnection.open → Channel → Process

A **channel** is all that a scheduler has to give for a node to be set up and used: a byte pipe to ``/bin/sh`` there, with its exit status and
half-close. What a shell starts may end with its channel; a daemon that must not is started by a holder (`kernels.daemon.attach`).

command       a local program as a channel: srun, ssh, kubectl
config        ~/.ssh/config evaluated for a host
connecting    many hosts connected concurrently; a connection whose channels are paramiko's
dial          streams to an sshd: TCP, ProxyJump; cancellation of connects under way, and login slots per sshd
host          what leads to one host: scripts, processes, uploads, each over a channel
hostlist      host names and ranges as users write them
keys          the user's private keys (ssh-agent, files, passphrases), and the hosts' by known_hosts
login         over paramiko: SSH handshake, host key check, public-key authentication
openssh       OpenSSH's own client: a master per host, found open or opened with a prompt
process       a remote process over one channel
programs      a scheduler's programs, on this machine or on its login node
sealed        a channel with TLS inside, for schedulers that carry it in clear
proxy_command  a ProxyCommand: a child process whose input and output lead to an sshd
"""
