"""Messages that say in their metadata which contents of which ranks they are of.

What a kernel was sending when it was killed is sent again by the next one: at least once. Who listens to both and drops what it has had
by these sequence numbers has it exactly once.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, cast

METADATA = "skymagic"
"""Where it stands in the metadata of a stream's message, and in that of a display, which notebooks keep: a list of mappings."""
REGISTER_SECONDS = 1.0
"""Seconds in which a kernel's own thread takes a hook."""

Identity = Mapping[str, Any]
"""Of one content: ``job_id``, ``run``, ``rank``, and the first and last of its numbers, ``from`` and ``to``."""


class Hook:
    """ipykernel's hook of one stream: called on the IOPub thread with each message before it is sent."""

    def __init__(self) -> None:
        self.under_way: list[tuple[str, Sequence[Identity]]] = []
        """(text that a thread is writing, what it is of)."""

    def __call__(self, message: dict[str, Any]) -> dict[str, Any]:
        text = message["content"]["text"]  # with what other threads have printed meanwhile
        if found := [each for part, identities in list(self.under_way) if part in text for each in identities]:
            message["metadata"] = {**message["metadata"], METADATA: found}
        return message


@contextlib.contextmanager
def identified(stream: Any, text: str, identities: Sequence[Identity]) -> Iterator[None]:
    """The message in which this text is sent from within says what it is of, where the kernel can say that."""
    hook = _hook_of(stream) if identities else None
    if hook is None:
        yield
        return
    entry = text, identities
    hook.under_way.append(entry)
    try:
        yield
    finally:
        hook.under_way.remove(entry)


def _hook_of(stream: Any) -> Hook | None:
    """That of a stream; None where it takes none: an older ipykernel's, or something else in the place of a kernel's stream."""
    register, thread = getattr(stream, "register_hook", None), getattr(stream, "pub_thread", None)
    if register is None or thread is None:
        return None
    hook = getattr(stream, "_skymagic_hook", None)
    if hook is None:
        hook = stream._skymagic_hook = Hook()
        registered = threading.Event()  # ipykernel keeps hooks by the thread that registers them
        thread.schedule(partial(register, hook))
        thread.schedule(registered.set)
        registered.wait(REGISTER_SECONDS)
    return cast(Hook, hook)
