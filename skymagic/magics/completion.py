"""Tab completion on magic lines: options, names of pools, hosts, GPUs, plugins and variables."""

from __future__ import annotations

import ast
import os
import re
from typing import Any

from IPython.core.completer import SimpleCompletion, context_matcher
from IPython.core.interactiveshell import InteractiveShell

from skymagic import plugins, providers
from skymagic.data.capture.names import cell_names
from skymagic.errors import PoolError, RequestError
from skymagic.magics.arguments import help
from skymagic.magics.arguments.options import MAGICS
from skymagic.pool import records, registry
from skymagic.ssh.config import aliases

LINE = re.compile(r"(?:%{1,2}|[\w, \t]+=[ \t]*%)(sky_\w+)[ \t]+(.*)$", re.DOTALL)
"""A magic, also one whose value is given a name."""
ASSIGNED = re.compile(r"^[ \t]*((?:\w+[ \t]*,[ \t]*)*\w+)[ \t]*(?::[^=\n]+)?=(?!=)", re.MULTILINE)
"""Names that a line of Python assigns, for cells that do not compile yet."""


def register(shell: InteractiveShell) -> None:
    """Add the matcher to a shell's completer; twice is safe."""

    @context_matcher(identifier="skymagic")
    def skymagic_matcher(context: Any) -> dict[str, Any]:
        body = "\n".join(context.full_text.split("\n")[context.cursor_line + 1 :])
        found = complete(context.text_until_cursor, shell.user_ns, body)
        if found is None:
            return {"completions": []}
        fragment, words = found
        completions = [SimpleCompletion(text=word, type="option") for word in words]
        return {
            "completions": completions,
            "matched_fragment": fragment,
            "suppress": True,
            "ordered": True,
        }

    matchers = shell.Completer.custom_matchers
    matchers[:] = [one for one in matchers if getattr(one, "matcher_identifier", "") != "skymagic"]
    matchers.append(skymagic_matcher)


def complete(text: str, namespace: dict[str, Any], body: str = "") -> tuple[str, list[str]] | None:
    """What may follow on a line up to the cursor: the piece that it replaces, and the words; None off magic lines.

    Args:
        namespace: the notebook's.
        body: the lines below the magic's.
    """
    line = LINE.match(text.lstrip())
    if line is None or line[1] not in MAGICS:
        return None
    variables, theirs = [name for name in namespace if not name.startswith("_")], _names_of_ranks()
    names = help.CompletionNames(
        pools=tuple(one.name for one in registry.pools()), left=tuple(one.name for one in records.every()), hosts=_hosts(),
        variables=tuple(variables), theirs=theirs, gathered=tuple({*theirs, *variables, *assigned(body)}),
        environment=tuple(os.environ), providers=("auto", *providers.names()), plugins=tuple(plugins.names()),
        plugin_options=plugins.options,
    )  # fmt: skip
    words = help.complete(line[1], line[2], names)
    return re.split(r"[ \t=,]", line[2])[-1], words


def assigned(body: str) -> set[str]:
    """Names that a cell sets, modules not among them; as far as they can be seen where it does not compile."""
    try:
        modules = {
            (alias.asname or alias.name).partition(".")[0]
            for node in ast.walk(ast.parse(body))
            if isinstance(node, ast.Import | ast.ImportFrom)
            for alias in node.names
        }
        return {name for name in cell_names(body).stores - modules if not name.startswith("_")}
    except (SyntaxError, ValueError, RecursionError):
        found = ASSIGNED.findall(body)
        return {
            name for names in found for name in re.split(r"[,\s]+", names) if name.isidentifier()
        }


def _hosts() -> tuple[str, ...]:
    """Names of ~/.ssh/config."""
    try:
        return aliases()
    except RequestError:  # others may write it
        return ()


def _names_of_ranks() -> tuple[str, ...]:
    """Variables of the pool used last."""
    try:
        return tuple(sorted(registry.pool_named(None).shipper.names()))
    except PoolError:  # there is none, or it is starting
        return ()
