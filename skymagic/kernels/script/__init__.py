"""A shell script on a node: its environment, the worker that failed first, and the end of all that it started.

script         starts the script beside the rank, waits, ends what it leaves, and says how it ended
environment    the script's variables
root_cause     why it failed, from torch's error file or its last lines; pure
"""
