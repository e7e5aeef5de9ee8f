"""A shell script on a node: its environment, the worker that failed first, and the end of all that it started."""
