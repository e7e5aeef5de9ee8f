"""Channels over a program that relays a shell's streams, as a scheduler's launcher does."""

from __future__ import annotations

import os
import sys
import threading

from skymagic.ssh.command import CommandChannel

ASYNCIO_LAUNCHER = """
import asyncio, sys

async def copy(reader, writer):
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    writer.close()

async def main(command):
    loop = asyncio.get_running_loop()
    shell = await asyncio.create_subprocess_shell(command, stdin=-1, stdout=-1)
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    transport, protocol = await loop.connect_write_pipe(asyncio.streams.FlowControlMixin, sys.stdout)
    writer = asyncio.StreamWriter(transport, protocol, None, loop)
    await asyncio.gather(copy(reader, shell.stdin), copy(shell.stdout, writer))
    return await shell.wait()

sys.exit(asyncio.run(main(sys.argv[1])))
"""


def test_launcher_built_on_asyncio_relays_both_directions() -> None:
    """asyncio watches its output for the end of the reader: it must not be the input as well."""
    channel = CommandChannel([sys.executable, "-c", ASYNCIO_LAUNCHER], dict(os.environ))
    channel.exec_command("cat; exit 3")
    sent = os.urandom(1 << 22)  # both directions at once, beyond the buffers of the sockets
    channel.settimeout(60)

    def send() -> None:
        view = memoryview(sent)
        while view:
            view = view[channel.send(bytes(view[: 1 << 16])) :]
        channel.shutdown_write()

    writer = threading.Thread(target=send)
    writer.start()
    try:
        assert b"".join(iter(lambda: channel.recv(1 << 16), b"")) == sent
        writer.join()
        assert channel.recv_exit_status() == 3
    finally:
        channel.close()
