"""The stores of several nodes, filled and emptied through a depot on each: the notebook's side, and the messages of both."""
