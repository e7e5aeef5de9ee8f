"""A node's agent: starts ranks, watches them, filters what they print, and ends them."""
