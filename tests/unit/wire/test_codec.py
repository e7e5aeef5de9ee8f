"""The codec: what comes back is what was sent, in whatever pieces; what is no message is refused."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skymagic.wire import agent, files, store
from skymagic.wire.codec import Codec, WithPayload
from skymagic.wire.typed import reader
from tests.lab.golden import Golden


@dataclass(frozen=True)
class Plain:
    ranks: tuple[int, ...] = ()
    values: dict[str, Any] = field(default_factory=dict)
    words: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Blob(WithPayload):
    name: str
    nbytes: int


CODEC: Codec[Plain | Blob] = Codec(Plain, Blob, max_line=20_000, max_payload=100)
TEXT = st.text(max_size=20)
PLAIN = st.builds(
    Plain,
    st.lists(st.integers(), max_size=5).map(tuple),
    st.dictionaries(TEXT, TEXT, max_size=5),
    st.lists(TEXT, max_size=5),
)
SENT = st.lists(st.one_of(PLAIN.map(lambda one: (one, b"")), st.binary(max_size=100).map(lambda data: (Blob("b", len(data)), data))))  # fmt: skip


@given(SENT, st.integers(1, 50))
def test_sent_messages_are_decoded(sent: list[tuple[Any, bytes]], step: int) -> None:
    whole = b"".join(CODEC.encode(*one) for one in sent)
    pieces = iter([*(whole[n : n + step] for n in range(0, len(whole), step)), b""])
    messages = CODEC.messages(lambda: next(pieces))
    assert [
        (message, bytes(payload)) for message, payload in (next(messages) for _ in sent)
    ] == sent
    with pytest.raises(EOFError):
        next(messages)


@pytest.mark.parametrize(
    "line",
    [
        b"", b"Welcome to this host", b"{}", b"[]", b'["Plain"]', b'["Plain",[]]', b'["Plain",{"ranks":1}]',
        b'["Plain",{"unknown":1}]', b'["Nobody",{}]', b'[[],{}]', b'["Blob",{"name":"b"}]',
        b'["Blob",{"name":"b","nbytes":-1}]', b'["Blob",{"name":"b","nbytes":101}]',
        b'["Blob",{"name":"b","nbytes":"1"}]', b"\x80\x04\x95", b"[" * 100_000,
    ],
)  # fmt: skip
def test_invalid_messages_are_refused(line: bytes) -> None:
    with pytest.raises(ValueError, match=r"\bmessage\b"):
        CODEC.decode(line)


def test_a_line_has_an_end() -> None:
    decoder = CODEC.decoder()
    with pytest.raises(ValueError, match="longer than 20000 bytes"):
        [list(decoder.feed(b"x" * 1000)) for _ in range(21)]


def test_noise_is_skipped_before_the_first_message_only(golden: Golden) -> None:
    whole = b"Welcome\n\n[1] 4711\n" + CODEC.encode(Plain())
    assert list(CODEC.decoder(noise=True).feed(whole)) == [Plain()]
    assert CODEC.first(whole + b"rest\n", noise=True) == (Plain(), b"rest\n")
    assert CODEC.first(whole[:-1], noise=True) is None
    with golden.raises(ValueError):
        list(CODEC.decoder(noise=True).feed(whole + b"late\n"))
    with pytest.raises(ValueError, match="'Welcome"):
        CODEC.first(b"Welcome\n" * 4000, noise=True)
    with golden.raises(ValueError):  # of another version: told, and not waited for
        CODEC.first(b'noise\n["Plain",{"new":1}]\n', noise=True)


def test_store_names_cannot_leave_the_folder(golden: Golden) -> None:
    line = json.dumps(["Delete", {"names": ["../precious"]}]).encode()
    with golden.raises(ValueError):
        store.decode(line)


@pytest.mark.parametrize(
    "codec", [agent.CODEC, files.CODEC, store.CODEC], ids=["agent", "files", "store"]
)
def test_annotations_of_all_messages_can_be_read(codec: Codec[Any]) -> None:
    for kind in codec._kinds.values():
        reader(kind)


def test_tuples_stay_tuples() -> None:
    assert agent.decode(agent.encode(agent.Signal((1, 2), 9))) == agent.Signal((1, 2), 9)
