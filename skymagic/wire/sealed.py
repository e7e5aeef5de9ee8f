"""TLS 1.3 over an unencrypted channel, such as the streams of ``srun`` or the calls of a Ray actor.

The notebook is the TLS server, with a certificate created for this session only, so that the node
needs nothing but Python's standard library. Keys are agreed by ephemeral Diffie-Hellman. Inside the
session both ends prove that they know the pool's channel key, bound to the fingerprint of the
certificate, and then the node runs a shell::

    node → notebook   MARK in clear, because shells and prologues may print before it;
                      then the TLS handshake
    node → notebook   CLAIM: which key the node knows, and its proof
    node ← notebook   GRANT: the notebook's proof, the key if the node has none,
                      and the command to run
    node → notebook   READY: the node has checked the notebook's proof and stored the key
    both              INPUT, OUTPUT, ERRORS, and STATUS at the end

A man in the middle who terminates TLS with another certificate sees different fingerprints on
either side, and can prove neither.

This file is also the program that runs on the node (`program_text`), before any of skymagic's code
is installed. It must keep to the standard library and to the syntax of Python 3.6, which is the
system's Python on many clusters.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import hmac
import json
import logging
import os
import signal
import ssl
import stat
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

# Log what happened in a session, and never a key, a proof, a command or its output.
logger = logging.getLogger(__name__)  # "__main__" on a node

MARK = b"\nskymagic-tls-1\n"
NO_TLS = 99
"""Exit status of the program if Python is too old or lacks TLS 1.3; the next interpreter is tried.
"""
MAX_NOISE = 1 << 20
"""Most bytes that may precede the mark."""
MAX_FRAME = 1 << 20
READ_SIZE = 1 << 18
CLAIM, GRANT, READY, INPUT, OUTPUT, ERRORS, STATUS = range(1, 8)
HEADER = struct.Struct(">BI")
"""Kind of a frame, and the length of its data."""
NODE, NOTEBOOK = "skymagic channel: node", "skymagic channel: notebook"
SHARED, STORED, NONE = "shared", "stored", ""
"""Source of the key that a node knows: the shared home folder, an earlier session, or none."""
KEY_NAME = "channel.key"
"""File that stores the key in the folder of a node's holder."""
HOLDER_TIMEOUT = 10.0
"""Seconds that the job's holder may take to create its folder."""
END_TIMEOUT = 2.0
"""Seconds between SIGTERM and SIGKILL for a shell."""
QUIET_TIMEOUT = 1.0
"""Seconds to wait for a shell's output after it ended."""
ABANDONED_TIMEOUT = 5.0
"""Seconds that a shell may take to end by itself once the notebook is gone."""
LOG_NAME = "channel.log"
"""Log of a node's sessions in the folder of its holder, if `SKYMAGIC_LOG` is set on the node."""
LOG_FORMAT = "%(asctime)s %(levelname)s wire.sealed: %(message)s pid=%(process)d"


def home_key(job: str) -> str:
    """Return the path of a pool's channel key in a home folder that nodes may share."""
    return os.path.join(os.path.expanduser("~"), ".skymagic", "channels", job, "key")


def fingerprint(certificate: bytes) -> str:
    """Return the SHA-256 of a certificate in DER, as hex digits."""
    return hashlib.sha256(certificate).hexdigest()


def fingerprint_of(pem: str) -> str:
    """Return the fingerprint of the certificate in a PEM text that also has its private key."""
    return fingerprint(ssl.PEM_cert_to_DER_cert(pem[: pem.index("-----BEGIN PRIVATE")]))


def proof(key: str, role: str, session_fingerprint: str) -> str:
    """Return proof that one end (`NODE`, `NOTEBOOK`) knows the key in this fingerprint's
    session.
    """
    message = role.encode() + b"\0" + session_fingerprint.encode()
    return hmac.new(key.encode(), message, hashlib.sha256).hexdigest()


def parse_message(data: bytes) -> dict[str, str]:
    """Return the object in a frame of JSON. Raises ValueError."""
    message = json.loads(data.decode())
    if not isinstance(message, dict):
        raise ValueError("a frame holds no object")
    return {str(name): str(value) for name, value in message.items()}


class SealedStream:
    """End of a TLS session whose records pass through two functions.

    One thread may read while others write.

    Args:
        context: this end's TLS settings.
        server: True at the notebook's end.
        read: returns the bytes available, at least one; b"" at the end.
        write: sends all of these bytes.
    """

    def __init__(
        self,
        context: ssl.SSLContext,
        server: bool,
        read: Callable[[], bytes],
        write: Callable[[bytes], object],
    ) -> None:
        self._read, self._write = read, write
        self._role = "notebook" if server else "node"
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=server)
        # OpenSSL's session belongs to one thread at a time. The lock is never held during I/O: a
        # write that waits for the other end to read must not keep this end from reading.
        self._session = threading.Lock()
        self._sending = threading.Lock()  # records leave in the order in which they were sealed
        self._plain = bytearray()

    def feed(self, data: bytes) -> None:
        """Take bytes that were already read from the channel."""
        self._incoming.write(data)

    def handshake(self) -> None:
        """Agree on keys. Raises OSError (`ssl.SSLError` among them) or EOFError."""
        while True:
            try:
                self._tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                self._flush()
                if not self._receive():
                    raise EOFError("the other end has closed the channel") from None
            except ssl.SSLError as problem:
                logger.info("TLS handshake failed: end=%s reason=%s", self._role, problem.reason)
                with contextlib.suppress(OSError):
                    self._flush()  # the alert tells the other end
                raise
        self._flush()
        cipher = self._tls.cipher()
        logger.debug(
            "TLS session is open: end=%s version=%s cipher=%s",
            self._role,
            self._tls.version(),
            cipher[0] if cipher else "",
        )

    def peer(self) -> str:
        """Return the fingerprint of the other end's certificate."""
        return fingerprint(self._tls.getpeercert(binary_form=True) or b"")

    def put(self, kind: int, data: bytes = b"") -> None:
        """Send a frame."""
        view = memoryview(HEADER.pack(kind, len(data)) + data)
        with self._sending:
            while view:
                with self._session:
                    # Seal and write piece by piece; `_sending` keeps the pieces of a frame
                    # together.
                    view = view[self._tls.write(view) :]
                    records = self._outgoing.read()
                self._write(records)

    def get(self) -> tuple[int, bytes] | None:
        """Return the next frame's kind and data, or None at the end.

        Raises:
            OSError: records were tampered with.
        """
        if not self._need(HEADER.size):
            logger.debug("TLS session has ended: end=%s", self._role)
            return None
        kind, length = HEADER.unpack_from(self._plain)
        # The other end may not be authenticated yet: it must not make this one buffer 4 GiB.
        if length > MAX_FRAME:
            raise ValueError(f"a frame has {length} bytes")
        if not self._need(HEADER.size + length):
            return None
        data = bytes(self._plain[HEADER.size : HEADER.size + length])
        del self._plain[: HEADER.size + length]
        return kind, data

    def put_message(self, kind: int, message: dict[str, str]) -> None:
        """Send a frame of JSON."""
        self.put(kind, json.dumps(message).encode())

    def get_message(self, kind: int) -> dict[str, str]:
        """Return the next frame, which must be JSON of this kind.

        Raises EOFError, ValueError, OSError.
        """
        frame = self.get()
        if frame is None:
            raise EOFError("the other end has closed the session")
        if frame[0] != kind:
            raise ValueError(f"a frame of kind {frame[0]} came instead of {kind}")
        return parse_message(frame[1])

    def _need(self, nbytes: int) -> bool:
        """Read until this many bytes of plain text are buffered; return False at the end."""
        while len(self._plain) < nbytes:
            before = len(self._plain)
            with self._session, contextlib.suppress(ssl.SSLWantReadError, ssl.SSLZeroReturnError):
                while True:
                    piece = self._tls.read(READ_SIZE)
                    if not piece:
                        break
                    self._plain += piece
            # Nothing was decrypted: more records are needed.
            if len(self._plain) == before and not self._receive():
                return False
        return True

    def _flush(self) -> None:
        records = self._outgoing.read()
        if records:
            self._write(records)

    def _receive(self) -> bool:
        data = self._read()
        with self._session:
            self._incoming.write(data)
        return bool(data)


# -- the program on a node -------------------------------------------------------------------------


def node_context() -> ssl.SSLContext:
    """Return the node's TLS settings.

    The certificate is verified by proof or fingerprint, not by issuer.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    # Python 3.6 cannot name a minimum; the notebook accepts nothing but TLS 1.3
    if hasattr(context, "minimum_version"):
        context.minimum_version = ssl.TLSVersion.TLSv1_3
    return context


def main(job: str, pinned: str = "") -> int:
    """Authenticate the notebook, run its command, and return the exit status.

    Args:
        pinned: fingerprint of the only certificate to accept, if it is already known.
    """

    def send(data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(1, view) :]

    log_to_file()
    stream = SealedStream(node_context(), False, lambda: os.read(0, READ_SIZE), send)
    try:
        send(MARK)
        stream.handshake()
        command = authenticate(stream, job, pinned)
    # KeyError: a field of the answer is missing
    except (OSError, EOFError, ValueError, KeyError) as problem:
        logger.info("no session: job=%s error=%s", job, type(problem).__name__)
        print(f"no encrypted session with the notebook: {problem}", file=sys.stderr)
        return 1
    if not command:
        logger.info("session only stored the key: job=%s", job)
        return 0
    return serve(stream, command)


def log_to_file() -> None:
    """Write this node's log if the environment asks for one and the holder has a folder.

    Nothing is written to standard error, which belongs to the shell of the session.
    """
    level = os.environ.get("SKYMAGIC_LOG", "").upper()
    folders = holder_folders() if level in ("DEBUG", "INFO") else []
    if folders:
        path = os.path.join(folders[0], LOG_NAME)
        with contextlib.suppress(OSError):
            os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600))  # for its mode
            handler = logging.FileHandler(path)
            handler.setFormatter(logging.Formatter(LOG_FORMAT))
            logger.addHandler(handler)
            logger.setLevel(level)
    logger.propagate = False


def authenticate(stream: SealedStream, job: str, pinned: str) -> str:
    """Prove knowledge of the key, check the notebook's proof, and return the command to run.

    Raises:
        PermissionError: the other end is not the pool's notebook, or refuses this node.
    """
    fingerprint_seen = stream.peer()
    # Before the claim, so that a stranger does not learn whether this node has a key.
    if pinned and not hmac.compare_digest(fingerprint_seen, pinned):
        logger.info("certificate is not the expected one: job=%s", job)
        raise PermissionError("the other end is not the notebook that has made the pool")
    knows, key, problem = known_key(job)
    claim = {"knows": knows, "problem": problem}
    if key:
        claim["proof"] = proof(key, NODE, fingerprint_seen)
    logger.debug("key is claimed: job=%s source=%s problem=%s", job, knows or "none", problem)
    stream.put_message(CLAIM, claim)
    grant = stream.get_message(GRANT)
    problem = grant.get("refused", "")
    if (
        not problem
        and key
        and not hmac.compare_digest(grant["proof"], proof(key, NOTEBOOK, fingerprint_seen))
    ):
        problem = "the other end does not know the pool's channel key"
    if not problem and knows != STORED:
        try:
            store(key or grant["key"], wait=not key)
            logger.info("key is stored: job=%s", job)
        except OSError as failure:
            # A key in the home folder suffices without a stored copy.
            problem = "" if key else f"the channel key cannot be kept: {failure}"
    stream.put_message(READY, {"problem": problem})
    if problem:
        logger.info("session is refused: job=%s reason=%s", job, problem)
        raise PermissionError(problem)
    logger.info("notebook is authenticated: job=%s", job)
    return grant["command"]


def known_key(job: str) -> tuple[str, str, str]:
    """Return which key this node knows, that key, and the reason if a key file cannot be used."""
    stored_keys = [(STORED, os.path.join(folder, KEY_NAME)) for folder in holder_folders()]
    for knows, path in [*stored_keys, (SHARED, home_key(job))]:
        try:
            return knows, read_key(path), ""
        except FileNotFoundError:
            continue
        except OSError as problem:
            return NONE, "", f"{path}: {problem.strerror or problem}"
    return NONE, "", ""


def holder_folders() -> list[str]:
    """Return this user's folders of the job's holder.

    Anybody can create a folder with the usual name; the holder then adds letters to its own.
    """
    usual = os.environ.get("SKYMAGIC_HOLDER", "")
    parent, name = os.path.split(usual)
    private_folders = []
    with contextlib.suppress(OSError):
        longer_names = [entry for entry in os.listdir(parent) if entry.startswith(name + "+")]
        for entry in [name, *longer_names] if name else []:
            folder = os.path.join(parent, entry)
            with contextlib.suppress(FileNotFoundError):
                status = os.lstat(folder)
                private = stat.S_ISDIR(status.st_mode) and not stat.S_IMODE(status.st_mode) & 0o077
                if private and status.st_uid == os.geteuid():
                    private_folders.append(folder)
    return private_folders


def read_key(path: str) -> str:
    """Return the key in a file.

    Raises:
        OSError: others could have read or written the file, so it proves nothing.
    """
    for name in (os.path.dirname(path), path):
        status = os.lstat(name)
        if status.st_uid != os.geteuid():
            raise PermissionError(f"{name} belongs to another user")
        # Others must not read the file, nor write to its folder.
        if stat.S_IMODE(status.st_mode) & (0o077 if name == path else 0o022):
            raise PermissionError(f"{name} is open to other users")
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW)) as file:
        return file.read().strip()


def store(key: str, wait: bool) -> None:
    """Store the key in the holder's folder.

    Later sessions then depend on neither the home folder nor trust.

    Args:
        wait: wait until the holder has created its folder.
    """
    deadline = time.monotonic() + (HOLDER_TIMEOUT if wait else 0.0)
    while True:
        folders = [path for path in holder_folders() if os.path.exists(os.path.join(path, "start"))]
        if folders:
            break
        if time.monotonic() >= deadline:
            raise FileNotFoundError("the job's holder is not on this node")
        time.sleep(0.02)
    folder = folders[0]
    part = os.path.join(folder, f"{KEY_NAME}.{os.getpid()}")
    with open(os.open(part, os.O_CREAT | os.O_WRONLY | os.O_EXCL, 0o600), "w") as file:
        file.write(key)
    # Renamed when complete, so that a concurrent session never reads half a key.
    os.rename(part, os.path.join(folder, KEY_NAME))


def serve(stream: SealedStream, command: str) -> int:
    """Run a shell command with its streams in the session until it ends."""
    pipe = subprocess.PIPE
    shell = subprocess.Popen(
        ["/bin/sh", "-c", command],
        stdin=pipe,
        stdout=pipe,
        stderr=pipe,
        bufsize=0,
        start_new_session=True,  # the notebook ends a process by its group
    )
    logger.info("shell starts: shell=%s", shell.pid)

    def kill(signum: int) -> None:
        # Once the shell was waited for, its number may belong to another process group.
        if shell.returncode is None:
            logger.info("shell is signalled: shell=%s signal=%s", shell.pid, signum)
            with contextlib.suppress(OSError):
                os.killpg(shell.pid, signum)

    def end(seconds: float) -> None:
        if seconds:
            time.sleep(seconds)
        kill(signal.SIGTERM)
        time.sleep(END_TIMEOUT)
        kill(signal.SIGKILL)

    def end_soon(*_: Any) -> None:
        # Not in the handler itself: it runs on the main thread, which waits for the shell's end.
        threading.Thread(target=end, args=(0.0,), daemon=True).start()

    def copy_in() -> None:
        assert shell.stdin is not None
        with contextlib.suppress(OSError, ValueError):
            while True:
                frame = stream.get()
                if frame is None:
                    break
                if shell.stdin.closed:  # the rest is discarded, as in a pipe without a reader
                    continue
                view = memoryview(frame[1])
                try:
                    while view:
                        view = view[os.write(shell.stdin.fileno(), view) :]
                except BrokenPipeError:
                    stream.put(INPUT)  # makes the notebook's writes fail
                if view or not frame[1]:
                    shell.stdin.close()
        logger.info("session has ended at the notebook: shell=%s", shell.pid)
        with contextlib.suppress(OSError):
            shell.stdin.close()
        end(ABANDONED_TIMEOUT)

    # Kinds of output of which a piece is being sent: the session must not end in the middle of it.
    busy = set()

    def copy_out(source: Any, kind: int) -> None:
        with contextlib.suppress(OSError):
            while True:
                data = os.read(source.fileno(), READ_SIZE)
                if not data:
                    break
                busy.add(kind)
                stream.put(kind, data)
                busy.discard(kind)
        busy.discard(kind)

    # When this program is ended by a signal, it must not leave the shell behind.
    for signum in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, end_soon)
    copies = [
        threading.Thread(target=copy_out, args=arguments, daemon=True)
        for arguments in ((shell.stdout, OUTPUT), (shell.stderr, ERRORS))
    ]
    for thread in [threading.Thread(target=copy_in, daemon=True), *copies]:
        thread.start()
    status = shell.wait()
    logger.info("shell has ended: shell=%s status=%s", shell.pid, status)
    # A process left behind may hold the shell's streams for ever. Output already under way is sent
    # in full.
    for thread in copies:
        thread.join(QUIET_TIMEOUT)
        while thread.is_alive() and busy:
            thread.join(QUIET_TIMEOUT)
    with contextlib.suppress(OSError):
        stream.put(STATUS, str(max(-1, status)).encode())
    return 0


# -- this file as a text ---------------------------------------------------------------------------


class _WithoutAnnotations(ast.NodeTransformer):
    """Drop everything that Python 3.6 cannot parse, and docstrings."""

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.AST | None:
        return None if node.module in ("__future__", "collections.abc", "typing") else node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.returns = None
        for argument in node.args.args:
            argument.annotation = None
        if node.args.vararg is not None:
            node.args.vararg.annotation = None
        self.generic_visit(node)
        return node

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        # `pass` rather than nothing, because a docstring may be all that a body has.
        text = isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        return ast.copy_location(ast.Pass(), node) if text else node


def program_text() -> str:
    """Return the program that runs on a node, for Python 3.6 and later; its arguments are those of
    `main`, preceded by one more.
    """
    import inspect

    tree = ast.parse(inspect.getsource(sys.modules[__name__]))
    names = [getattr(node, "name", "") for node in tree.body]
    tree.body = tree.body[: names.index(_WithoutAnnotations.__name__)]
    body = ast.unparse(ast.fix_missing_locations(_WithoutAnnotations().visit(tree)))
    return f"{BEGIN}{body}\n{END}"


BEGIN = f"""import sys
try:
    import ssl
    if not ssl.HAS_TLSv1_3:
        sys.exit({NO_TLS})
except (ImportError, AttributeError):
    sys.exit({NO_TLS})
"""
END = """status = main(*sys.argv[2:])
sys.stderr.flush()
os._exit(status)
"""
