"""A node's value server: values come from the notebook or another node, and go on from here."""
