"""What notebook and rank agree on: how an order is marked, and the name of a cell's value in its outcome."""

ORDER = "#%sky "
"""The first line of the code sent to a rank begins with it."""
LAST_VALUE = "the value of the last expression"
"""Among the variables that come back; no variable can be called so."""
