"""The client of ipyparallel: what it must not say."""

from __future__ import annotations

import logging

import pytest
from jupyter_client.session import Session

from skymagic.run.engine import without_key_warning


def test_a_session_without_a_key_is_no_news_for_users(caplog: pytest.LogCaptureFixture) -> None:
    log = logging.getLogger("session")  # IPython's own logger is not captured once a shell exists
    with without_key_warning():
        Session(key=b"")
    assert caplog.text == ""
    Session(key=b"", log=log)
    assert "Message signing is disabled" in caplog.text, (
        "the library words it differently: `without_key_warning` looks for other words now"
    )
