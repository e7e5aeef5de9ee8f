"""Servers and lines that fail: what is put arrives all the same, or the error says where it does not."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from skymagic.content.remote.client import ConnectionLost, StoreClient
from skymagic.content.remote.remote_store import RemoteStore
from skymagic.content.store import NodeStore
from skymagic.errors import PoolError
from skymagic.providers.local import ChildTransport
from skymagic.wire.store import Settings, StoreMessage
from tests.contracts.stores import MB, Cluster, put
from tests.lab.nodes import node_of, start


@pytest.fixture
def three() -> Iterator[Cluster]:
    with closing(Cluster(3)) as made:
        yield made


@pytest.mark.parametrize("when", [10_000, 5 * MB, 10 * MB + 300])
def test_the_line_to_the_head_breaks(three: Cluster, when: int) -> None:
    three.breaks[0] = [when, when // 8]
    values = [os.urandom(4 * MB) for _ in range(4)]
    keys = [three.store.put(None, [value], len(value)) for value in values]
    three.store.settle()
    assert all(map(three.everywhere, keys))
    assert len(three.lines[0]) == 3
    assert sum(three.sent()) < 16 * MB + 2 * 5 * MB


def test_a_server_that_is_silent_is_replaced() -> None:
    with closing(Cluster(2, silence_timeout=4.0)) as two:
        put(two, b"all are up")
        stopped = two.lines[1][0].pid
        os.kill(stopped, signal.SIGSTOP)
        assert two.everywhere(put(two, os.urandom(MB)))
        assert len(two.lines[1]) >= 2, "one on a busy machine may be silent too"
        two.lines[1][0].inner._child.wait()  # its successor has ended it


def test_notebook_serves_nodes_that_cannot_reach_each_other(three: Cluster) -> None:
    put(three, b"all are up")
    three.store._clients.all[0].listening = [("127.0.0.1", 9)]  # nobody is there
    data = os.urandom(2 * MB)
    assert three.everywhere(put(three, data))
    assert sum(three.sent()) < 2.1 * len(data)


def test_download_survives_a_broken_connection(three: Cluster) -> None:
    data = os.urandom(20 * MB)
    name = NodeStore(three.folders[2]).give([data], len(data))
    three.breaks[2] = [7 * MB, 9 * MB]
    assert three.store.take(name, 2) == data
    assert sum(line.got for line in three.lines[2]) < 23 * MB
    with pytest.raises(FileNotFoundError):
        three.store.take(name, 2)
    assert three.files(2) == []


def test_a_node_that_cannot_be_reached_is_named(tmp_path: Path) -> None:
    def refuse() -> ChildTransport:
        return ChildTransport(
            ["sh", "-c", "echo no such thing here >&2; exit 1"]
        )  # soon, on a busy machine too

    said: list[str] = []
    store = RemoteStore([node_of(0, "gpu7", refuse)], start, said.append, retry_timeout=1.0)
    with pytest.raises(
        PoolError, match=r"node 0 \(gpu7\) cannot be reached.*no such thing here.*%sky_down"
    ):
        store.put(None, [b"x"], 1)
    assert len(said) == 1
    store.close()


def test_message_that_cannot_be_handled_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(node: int, message: StoreMessage | None) -> None:
        if message is not None:
            raise ZeroDivisionError("planted")

    def serve() -> ChildTransport:
        module = "skymagic.kernels.store.server"
        return ChildTransport([sys.executable, "-m", module, str(tmp_path)])

    client = StoreClient(node_of(3, "gpu7", serve), start, Settings(), fail, 60.0)
    try:
        with pytest.raises(ConnectionLost):
            client.connect()
    finally:
        client.close()
    (record,) = (record for record in caplog.records if record.exc_info)
    assert "node=3" in record.getMessage()
    assert "planted" in caplog.text


def test_a_login_shell_that_prints(tmp_path: Path) -> None:
    with closing(Cluster(1)) as one:
        one.before[0] = ["sh", "-c", 'printf "Welcome!\\n[1, 2]\\n{}\\nlast"; exec "$@"', "sh"]
        assert one.everywhere(put(one, os.urandom(MB)))


def test_interrupt_while_nothing_moves(three: Cluster) -> None:
    put(three, b"all are up")
    data = os.urandom(30 * MB)  # not while the press may come
    os.kill(three.lines[0][0].pid, signal.SIGSTOP)
    press = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
    press.start()
    with pytest.raises(KeyboardInterrupt):
        put(three, data)
    assert len(three.store.keys()) == 1
    assert three.everywhere(put(three, data[:MB]))


def test_a_node_without_room_is_named(tmp_path: Path) -> None:
    if subprocess.run(["unshare", "-rm", "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine does not let users mount a tmpfs")
    with closing(Cluster(2)) as two:
        small = f"mount -t tmpfs -o size=8m,mode=700 none {two.folders[1]} && mount -t tmpfs -o size=9m none {tmp_path}"
        two.before[1] = [
            "unshare",
            "-rm",
            "sh",
            "-c",
            f'{small} && TMPDIR={tmp_path} exec "$@"',
            "sh",
        ]
        data = os.urandom(20 * MB)
        with pytest.raises(OSError, match="node1") as full:
            put(two, data)
        assert full.value.errno == errno.ENOSPC
        two.store.drop(two.store.keys())
        put(two, data[:MB])
        assert len(two.files(0)) == 1


def test_lost_node_is_skipped_and_readmitted(three: Cluster) -> None:
    old = put(three, os.urandom(2 * MB))
    three.store.lose(1)
    for path in three.files(1):
        path.unlink()
    three.lines[1][0].inner.close()
    new = put(three, os.urandom(2 * MB))
    assert len(three.files(1)) == 0
    with pytest.raises(PoolError, match="node1 is lost"):
        three.store.take("0" * 16 + "-" + "0" * 32, 1)
    three.store.readmit(three.nodes[1])
    three.store.settle()
    assert three.everywhere(old)
    assert three.everywhere(new)


def test_two_threads(three: Cluster) -> None:
    files = [NodeStore(three.folders[n]).give([os.urandom(3 * MB)], 3 * MB) for n in range(3)]
    taken: list[int] = []
    threads = [
        threading.Thread(target=lambda n=n: taken.append(len(three.store.take(files[n], n))))
        for n in range(3)
    ]
    for thread in threads:
        thread.start()
    keys = [put(three, os.urandom(3 * MB)) for _ in range(3)]
    for thread in threads:
        thread.join()
    assert taken == [3 * MB] * 3
    assert all(map(three.everywhere, keys))
