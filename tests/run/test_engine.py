"""The client of ipyparallel: what it must not say."""

from __future__ import annotations

import logging

import pytest
from jupyter_client.session import Session
from traitlets.log import get_logger

from skymagic.run.engine import without_key_warning


def test_a_session_without_a_key_is_no_news_for_users(caplog: pytest.LogCaptureFixture) -> None:
    log = get_logger()  # IPython's own once a shell exists, which propagates nothing
    log = log.logger if isinstance(log, logging.LoggerAdapter) else log
    log.addHandler(caplog.handler)
    try:
        with without_key_warning():
            Session(key=b"")
        assert caplog.text == ""
        Session(key=b"")
        assert "Message signing is disabled" in caplog.text, (
            "the library words it differently: `without_key_warning` looks for other words now"
        )
    finally:
        log.removeHandler(caplog.handler)
