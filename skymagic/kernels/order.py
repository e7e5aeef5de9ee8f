"""How an order is marked: the first line of the code sent to a rank."""

ORDER = "#%sky "
