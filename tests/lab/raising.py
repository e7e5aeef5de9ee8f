"""Expect an error of skymagic by its code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import pytest

from skymagic.errors import SkyError

Kind = TypeVar("Kind", bound=SkyError)


@contextmanager
def raises(kind: type[Kind], code: str, match: str = "") -> Iterator[pytest.ExceptionInfo[Kind]]:
    """Like `pytest.raises`, with the error's code; `match` is for names and numbers in its text."""
    with pytest.raises(kind, match=match or None) as failed:
        yield failed
    assert failed.value.code == code, str(failed.value)
