"""A node's store: files of values, written once and mapped by every rank."""
