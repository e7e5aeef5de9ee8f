"""Download the wheels of a lock file (``pylock.toml``), with only the standard library.

uv chooses the wheels for a platform, but has no command that downloads wheels as files. This module
does it in the notebook for hosts that reach no index, and `program` returns it as text for a host
that passes its wheels on to others. Both run it with uv's settings in the environment: the
credentials in ``UV_INDEX`` and ``UV_DEFAULT_INDEX`` apply to files on the same servers.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import netrc
import os
import shutil
import ssl
import sys
import time
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.client import HTTPResponse, HTTPSConnection
from pathlib import Path
from urllib.error import HTTPError
from urllib.parse import unquote, urlsplit
from urllib.request import (
    HTTPSHandler,
    OpenerDirector,
    ProxyHandler,
    Request,
    build_opener,
    getproxies,
    url2pathname,
)

PARALLEL = 8
ATTEMPTS = 3
TIMEOUT = 60.0
"""Seconds without a byte after which an attempt ends."""
PIECE = 1 << 20


@dataclass(frozen=True)
class LockedWheel:
    """A wheel that uv has chosen for a platform.

    Attributes:
        name: project name.
        version: version with its local label, such as ``"2.13.0+cpu"``.
        url: where the wheel is, without passwords.
        sha256: hash of the file; "" if neither the index nor uv knows it.
        nbytes: size of the file; None if the index does not report it.
    """

    name: str
    version: str
    url: str
    sha256: str = ""
    nbytes: int | None = None

    @property
    def file(self) -> str:
        """The wheel's file name."""
        return unquote(urlsplit(self.url).path.rpartition("/")[2])


def read_lock(text: str) -> tuple[LockedWheel, ...]:
    """Return the wheels of a lock file.

    Packages that were requested by their path or URL are left out.

    Raises:
        ValueError: a package has no wheel.
    """
    wheels = []
    for package in tomllib.loads(text).get("packages", []):
        if "archive" in package or "directory" in package or "vcs" in package:
            continue
        if not package.get("wheels"):
            raise ValueError(f"{package['name']} {package['version']} has no wheel")
        wheel = package["wheels"][0]
        url = wheel.get("url") or Path(wheel["path"]).absolute().as_uri()
        digest = wheel.get("hashes", {}).get("sha256", "")
        wheels.append(
            LockedWheel(package["name"], package["version"], url, digest, wheel.get("size"))
        )
    return tuple(wheels)


def write_lock(wheels: Sequence[LockedWheel]) -> str:
    """Return a lock file that `read_lock` reads."""
    lines = []
    for wheel in wheels:
        lines += ["[[packages]]", f"name = {json.dumps(wheel.name)}"]
        lines += [f"version = {json.dumps(wheel.version)}"]
        size = f", size = {wheel.nbytes}" if wheel.nbytes is not None else ""
        digest = f"{{ sha256 = {json.dumps(wheel.sha256)} }}" if wheel.sha256 else "{}"
        lines += [f"wheels = [{{ url = {json.dumps(wheel.url)}{size}, hashes = {digest} }}]"]
    return "\n".join([*lines, ""])


def download(wheels: Sequence[LockedWheel], folder: Path) -> None:
    """Download wheels into a folder, several at once, and check their hashes.

    Raises:
        OSError: a wheel could not be downloaded, or is not the file that the index announces.
    """
    opener = _opener()
    largest_first = sorted(wheels, key=lambda wheel: -(wheel.nbytes or 0))
    with ThreadPoolExecutor(PARALLEL) as pool:
        jobs = [pool.submit(_download, wheel, folder, opener) for wheel in largest_first]
        try:
            for job in jobs:
                job.result()
        finally:
            pool.shutdown(cancel_futures=True)


def _download(wheel: LockedWheel, folder: Path, opener: OpenerDirector) -> None:
    target, parts = folder / wheel.file, urlsplit(wheel.url)
    if parts.scheme == "file":
        source = url2pathname(parts.path)
        try:
            os.link(source, target)
        except OSError:  # another file system
            shutil.copyfile(source, target)
        return
    for attempt in range(1, ATTEMPTS + 1):
        try:
            _fetch(wheel, target, opener)
            return
        except (OSError, EOFError) as problem:
            refused = isinstance(problem, HTTPError) and problem.code < 500
            untrusted = isinstance(getattr(problem, "reason", None), ssl.SSLCertVerificationError)
            if refused or untrusted or attempt == ATTEMPTS:
                raise OSError(f"{wheel.file} could not be downloaded: {problem}") from problem
        time.sleep(attempt)


def _fetch(wheel: LockedWheel, target: Path, opener: OpenerDirector) -> None:
    request = Request(wheel.url)
    if header := authorization(wheel.url):
        # not sent to the server of a redirection
        request.add_unredirected_header("Authorization", header)
    digest = hashlib.sha256()
    partial = target.with_name(f"{target.name}.part")
    with opener.open(request, timeout=TIMEOUT) as reply, partial.open("wb") as file:
        while data := reply.read(PIECE):
            file.write(data)
            digest.update(data)
    if wheel.sha256 and digest.hexdigest() != wheel.sha256:
        raise EOFError("it is damaged, or not the file that the index announces")
    partial.rename(target)
    print(f" Downloaded {wheel.name}", flush=True)


def authorization(url: str) -> str:
    """Return the header that identifies this user to an index's server, or ""."""
    parts = urlsplit(url)
    indexes = f"{os.environ.get('UV_INDEX', '')} {os.environ.get('UV_DEFAULT_INDEX', '')}"
    for index in map(urlsplit, indexes.split()):
        if index.username and (index.scheme, index.hostname, index.port) == (
            parts.scheme,
            parts.hostname,
            parts.port,
        ):
            return _basic(unquote(index.username), unquote(index.password or ""))
    with contextlib.suppress(OSError, netrc.NetrcParseError):
        if login := netrc.netrc().authenticators(parts.hostname or ""):
            return _basic(login[0], login[2] or "")
    return ""


def _basic(user: str, password: str) -> str:
    return f"Basic {base64.b64encode(f'{user}:{password}'.encode()).decode()}"


def is_insecure(url: str) -> bool:
    """Return True if ``UV_INSECURE_HOST`` names the server: ``host``, ``host:port`` or a URL."""
    server = urlsplit(url)
    for entry in os.environ.get("UV_INSECURE_HOST", "").split():
        named = urlsplit(entry if "://" in entry else f"//{entry}")
        if named.hostname == server.hostname and named.port in (None, server.port or 443):
            return True
    return False


class _HttpsHandler(HTTPSHandler):
    """Checks the certificates of all servers but those that the user has excepted."""

    def https_open(self, req: Request) -> HTTPResponse:
        certificates = ssl.create_default_context()  # of SSL_CERT_FILE
        if is_insecure(req.full_url):
            certificates.check_hostname = False
            certificates.verify_mode = ssl.CERT_NONE
        return self.do_open(HTTPSConnection, req, context=certificates)


def _opener() -> OpenerDirector:
    proxies = getproxies()
    if everywhere := proxies.get("all"):
        proxies = {"http": everywhere, "https": everywhere, **proxies}
    return build_opener(ProxyHandler(proxies), _HttpsHandler)


def main() -> None:
    """Download the wheels of the lock file that the first argument names into a folder."""
    lock, folder = map(Path, sys.argv[1:3])
    try:
        folder.mkdir(parents=True, exist_ok=True)
        download(read_lock(lock.read_text()), folder)
    except (OSError, ValueError) as problem:
        sys.exit(str(problem))


def program() -> str:
    """Return the text of this file for a Python without skymagic."""
    import inspect

    return inspect.getsource(sys.modules[__name__])


if __name__ == "__main__":
    main()
