"""Shells on other hosts: connections over paramiko or OpenSSH's client, and schedulers' channels.

A `HostSpec` is a host as written, an `Endpoint` is the host as resolved, an `SSHConnection` is the
host as connected::

    "me@gpu[1-2]"  hostlist → HostSpec  config → Endpoint  connecting → SSHConnection
                   HostConnection.open → Channel → Process

A **channel** is all that a scheduler must provide to set up and use a node: a byte pipe to
``/bin/sh`` there, with its exit status and half-close. Processes started by a shell may end with
its channel; a daemon that must survive is started by a holder (`kernels.daemon.attach`). All code
that uses paramiko is in this folder.

command       a local program as a channel: srun, ssh, kubectl
config        ~/.ssh/config evaluated for a host
container     containers on a node: find an engine, get the image, start shells there
connecting    concurrent connections to many hosts; a connection with paramiko's channels
dial          streams to an sshd: TCP, ProxyJump; cancellation of connects, login slots per sshd
host          a connection to one host: scripts, processes, uploads, each over a channel
hostlist      host names and ranges as users write them
keys          the user's private keys (ssh-agent, files, passphrases), host keys in known_hosts
login         over paramiko: SSH handshake, host key check, public-key authentication
openssh       OpenSSH's own client: a master per host, already open or opened with a prompt
process       a remote process over one channel
programs      a scheduler's programs, on this machine or on its login node
sealed        a channel with TLS inside, for schedulers that transport it unencrypted
proxy_command  a ProxyCommand: a child process connected to an sshd
"""
