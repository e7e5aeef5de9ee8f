"""TLS byte streams between the nodes of a pool.

Both ends have the same certificate and key, created for one purpose, and trust no other.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import ssl
import tempfile

PIECE = 1 << 16


def context(pem: str, *, server: bool) -> ssl.SSLContext:
    """Return the TLS settings for an end, from the certificate and key (`pem`) that both ends
    share.
    """
    settings = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    settings.check_hostname = False  # the key identifies the other end, not its name
    settings.verify_mode = ssl.CERT_REQUIRED
    settings.minimum_version = ssl.TLSVersion.TLSv1_3
    # the one certificate is its own authority: nothing that another one has signed is accepted
    settings.load_verify_locations(cadata=pem[: pem.index("-----BEGIN PRIVATE")])
    with tempfile.NamedTemporaryFile("w") as file:  # mode 0600; `ssl` reads keys from files only
        file.write(pem)
        file.flush()
        settings.load_cert_chain(file.name)
    return settings


def pump(secure: ssl.SSLSocket, plain: socket.socket) -> None:
    """Copy both ways until either end closes.

    Runs on one thread, because a TLS connection cannot be used by two.
    """
    secure.setblocking(False)
    plain.setblocking(False)
    to_plain, to_secure = bytearray(), bytearray()
    open_ = True
    with contextlib.suppress(OSError):
        while open_:
            # Read from an end only once the other end has taken all earlier data: this bounds both
            # buffers.
            reads = [*([] if to_plain else [secure]), *([] if to_secure else [plain])]
            writes = [*([plain] if to_plain else []), *([secure] if to_secure else [])]
            # Decrypted bytes inside the TLS object do not make the socket readable: do not wait
            # then.
            if not secure.pending() or to_plain:
                select.select(reads, writes, [])
            if to_secure:
                with contextlib.suppress(ssl.SSLWantWriteError, ssl.SSLWantReadError):
                    del to_secure[: secure.send(to_secure)]
            if to_plain:
                with contextlib.suppress(BlockingIOError):
                    del to_plain[: plain.send(to_plain)]
            if not to_plain:
                with contextlib.suppress(ssl.SSLWantReadError, ssl.SSLWantWriteError):
                    data = secure.recv(PIECE)
                    to_plain += data
                    open_ = bool(data)
            # Nothing is appended to data that waits: OpenSSL requires that an unfinished write is
            # repeated with the same bytes.
            if open_ and not to_secure:
                with contextlib.suppress(BlockingIOError):
                    data = plain.recv(PIECE)
                    to_secure += data
                    open_ = bool(data)
    # Either end is closed: close the other one too.
    for end in (secure, plain):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
        end.close()


def certificate() -> str:
    """Return a new certificate with its private key, in PEM."""
    import datetime

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name(
        [x509.NameAttribute(x509.NameOID.COMMON_NAME, f"skymagic-{os.urandom(8).hex()}")]
    )
    epoch = datetime.datetime(2000, 1, 1)  # nodes' clocks may differ
    builder = x509.CertificateBuilder(
        name, name, key.public_key(), x509.random_serial_number(), epoch
    )
    # It lives as long as its pool: whoever has the key has the pool, so a date protects nothing.
    builder = builder.not_valid_after(datetime.datetime(2999, 1, 1))
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    signed = builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
    plain = serialization.NoEncryption()
    secret = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)
    return (signed + secret).decode()
