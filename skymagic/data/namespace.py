"""Type of the namespaces that cells run in."""

from __future__ import annotations

Namespace = dict[str, object]
"""Global names of a notebook or of a rank with the user's values, as in `shell.user_ns`.

The values are the user's: skymagic pickles, hashes and describes them, and knows nothing else about
them. Identity matters: a namespace is always passed by reference, never copied.
"""
