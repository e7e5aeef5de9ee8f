"""A node's daemon: keeps an agent alive without its connection, and lets the notebook attach again."""
