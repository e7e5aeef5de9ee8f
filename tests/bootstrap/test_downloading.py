"""Wheels from servers that only some users trust."""

from __future__ import annotations

import functools
import http.server
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from skymagic.bootstrap.downloading import LockedWheel, download
from skymagic.wire import tls


@pytest.fixture
def wheel(tmp_path: Path) -> Iterator[LockedWheel]:
    """A wheel on a server whose certificate nobody has signed."""
    (tmp_path / "served").mkdir()
    (tmp_path / "served/tiny-1.0-py3-none-any.whl").write_bytes(b"wheel")
    (tmp_path / "server.pem").write_text(tls.certificate())
    handler = functools.partial(
        http.server.SimpleHTTPRequestHandler, directory=str(tmp_path / "served")
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "server.pem")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        url = f"https://127.0.0.1:{server.server_port}/tiny-1.0-py3-none-any.whl"
        yield LockedWheel("tiny", "1.0", url)
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("named", ["127.0.0.1", "127.0.0.1:{port}", "https://127.0.0.1 other"])
def test_a_server_that_the_user_excepts_needs_no_certificate(
    wheel: LockedWheel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    port = wheel.url.split(":")[2].split("/")[0]
    monkeypatch.setenv("UV_INSECURE_HOST", named.format(port=port))
    (tmp_path / "got").mkdir()
    download([wheel], tmp_path / "got")
    assert (tmp_path / "got" / wheel.file).read_bytes() == b"wheel"


@pytest.mark.parametrize("named", ["", "127.0.0.2", "127.0.0.1:1"])
def test_other_servers_need_one(
    wheel: LockedWheel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    monkeypatch.setenv("UV_INSECURE_HOST", named)
    (tmp_path / "got").mkdir()
    with pytest.raises(OSError, match="CERTIFICATE_VERIFY_FAILED"):
        download([wheel], tmp_path / "got")
    assert not list((tmp_path / "got").iterdir())
