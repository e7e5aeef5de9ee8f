"""Connections to hosts over SSH: names, settings, known keys, connections. All of paramiko is in here.

``hosts`` reads what the user wrote, ``settings`` adds what ~/.ssh/config says of it, ``connecting`` makes connections,
``connection`` is one of them and ``process`` a process at its other end.
"""
