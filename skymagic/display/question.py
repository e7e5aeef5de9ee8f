"""A question to the user: yes or no, and no where nobody can answer."""

from __future__ import annotations

import getpass
import sys
import threading
from collections.abc import Callable

from skymagic.display.live import in_ipython, noninteractive

YES = ("y", "yes")


def confirmed(question: str) -> bool:
    """Whether the user says yes; no without a terminal or a notebook that can ask, and beside cells on other threads."""
    if threading.current_thread() is not threading.main_thread() or not _can_ask():
        return False
    try:
        answer = input(f"{question}. Go ahead? [y/N] ")
    except EOFError:
        return False
    return answer.strip().casefold() in YES


def asks_secrets() -> Callable[[str], str] | None:
    """What asks for a passphrase; None where nobody is to be asked."""
    return None if noninteractive() else getpass.getpass


def _can_ask() -> bool:
    """Whether somebody is there: a terminal, or a notebook's front end that takes questions (not papermill, not nbconvert)."""
    if noninteractive():
        return False
    if in_ipython():
        from IPython.core.getipython import get_ipython

        kernel = getattr(get_ipython(), "kernel", None)
        if kernel is not None:
            return bool(getattr(kernel, "_allow_stdin", False))
    return sys.stdin is not None and not sys.stdin.closed and sys.stdin.isatty()
