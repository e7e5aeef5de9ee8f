"""What plugins and the kernel of this rank know of each other, without importing each other."""

from __future__ import annotations

from typing import Any

active_plugins: list[Any] = []
"""The rank's `plugins.Plugin`s, in the order in which their hooks run."""
