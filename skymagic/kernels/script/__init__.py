"""A shell script on a node: its environment, the worker that failed first, and the end of all that it started.

script         starts the supervisor beside the rank, waits, and says how the script ended
environment    the script's variables
root_cause     why it failed, from torch's error file or its last lines; pure
"""
