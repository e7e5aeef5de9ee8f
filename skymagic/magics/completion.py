"""Tab completion on magic lines: options, names of pools, GPUs, plugins and variables."""

from __future__ import annotations

import re
from typing import Any

from IPython.core.completer import SimpleCompletion, context_matcher
from IPython.core.interactiveshell import InteractiveShell

from skymagic import plugins, providers
from skymagic.errors import PoolError
from skymagic.magics.arguments import help
from skymagic.magics.arguments.options import MAGICS
from skymagic.pool import records, registry

LINE = re.compile(r"(?:%{1,2}|[\w, \t]+=[ \t]*%)(sky_\w+)[ \t]+(.*)$", re.DOTALL)
"""A magic, also one whose value is given a name."""


def register(shell: InteractiveShell) -> None:
    """Add the matcher to a shell's completer; twice is safe."""

    @context_matcher(identifier="skymagic")
    def skymagic_matcher(context: Any) -> dict[str, Any]:
        found = complete(context.text_until_cursor, shell.user_ns)
        if found is None:
            return {"completions": []}
        fragment, words = found
        return {
            "completions": [SimpleCompletion(text=word, type="magic option") for word in words],
            "matched_fragment": fragment,
            "suppress": True,
        }

    matchers = shell.Completer.custom_matchers
    matchers[:] = [one for one in matchers if getattr(one, "matcher_identifier", "") != "skymagic"]
    matchers.append(skymagic_matcher)


def complete(text: str, namespace: dict[str, Any]) -> tuple[str, list[str]] | None:
    """What may follow on a line up to the cursor: the piece that it replaces, and the words; None off magic lines."""
    line = LINE.match(text.lstrip())
    if line is None or line[1] not in MAGICS:
        return None
    names = help.CompletionNames(
        pools=tuple(one.name for one in registry.every()),
        variables=tuple(name for name in namespace if not name.startswith("_")),
        theirs=_names_of_ranks(),
        plugins=tuple(plugins.names()),
        providers=("auto", *providers.names()),
        left=tuple(one.name for one in records.every()),
    )
    words = help.complete(line[1], line[2], names)
    return re.split(r"[ \t=,]", line[2])[-1], words


def _names_of_ranks() -> tuple[str, ...]:
    """Variables of the pool used last."""
    try:
        return tuple(sorted(registry.find(None).shipper.names()))
    except PoolError:  # there is none, or it is starting
        return ()
