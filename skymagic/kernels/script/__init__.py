"""Shell scripts on a node: environment, root cause of a failure, and the end of their processes.

script         starts the script from a rank, waits, ends left-over processes, and reports the end
environment    the script's environment variables
root_cause     why it failed, from torch's error file or its last lines; pure
"""
