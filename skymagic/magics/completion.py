"""Tab completion on magic lines: options, names of pools, hosts, GPUs, plugins and variables."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator

from IPython.core import completer
from IPython.core.interactiveshell import InteractiveShell

from skymagic import plugins, providers
from skymagic.data.capture.names import cell_names
from skymagic.data.namespace import Namespace
from skymagic.errors import PoolError, RequestError
from skymagic.magics.arguments import help
from skymagic.magics.arguments.options import MAGICS
from skymagic.pool import records, registry
from skymagic.ssh.config import aliases

LINE = re.compile(r"(?:%{1,2}|[\w, \t]+=[ \t]*%)(sky_\w+)[ \t]+(.*)$", re.DOTALL)
"""A magic on a line, also one whose value is assigned."""
ASSIGNED = re.compile(r"^[ \t]*((?:\w+[ \t]*,[ \t]*)*\w+)[ \t]*(?::[^=\n]+)?=(?!=)", re.MULTILINE)
"""Names that a line of Python assigns, for cells that do not compile yet."""


def register(shell: InteractiveShell) -> None:
    """Add the matcher to a shell's completer; calling it twice is safe."""
    if not hasattr(completer, "context_matcher"):
        _register_before_ipython_8_6(shell)
        return

    @completer.context_matcher(identifier="skymagic")
    def skymagic_matcher(context: completer.CompletionContext) -> completer.SimpleMatcherResult:
        body = "\n".join(context.full_text.split("\n")[context.cursor_line + 1 :])
        completion = complete(context.text_until_cursor, shell.user_ns, body)
        if completion is None:
            return completer.SimpleMatcherResult(completions=[])
        fragment, completions = completion
        return completer.SimpleMatcherResult(
            completions=[
                completer.SimpleCompletion(text=word, type="option") for word in completions
            ],
            matched_fragment=fragment,
            suppress=True,
            ordered=True,
        )

    matchers = shell.Completer.custom_matchers
    matchers[:] = [
        matcher for matcher in matchers if getattr(matcher, "matcher_identifier", "") != "skymagic"
    ]
    matchers.append(skymagic_matcher)


def _register_before_ipython_8_6(shell: InteractiveShell) -> None:
    """Complete magic lines in a shell whose matchers know one line and cannot exclude others.

    Google Colab has IPython 7.34.
    """
    plain = shell.Completer.completions
    if getattr(plain, "is_skymagic", False):
        return

    def completions(text: str, offset: int) -> Iterator[completer.Completion]:
        line_start = text.rfind("\n", 0, offset) + 1
        body = text[offset:].partition("\n")[2]
        fragment, words = complete(text[line_start:offset], shell.user_ns, body) or ("", [])
        if not words:
            yield from plain(text, offset)
        for word in words:
            yield completer.Completion(offset - len(fragment), offset, word, type="option")

    completions.is_skymagic = True  # type: ignore[attr-defined]
    shell.Completer.completions = completions


def complete(text: str, namespace: Namespace, body: str = "") -> tuple[str, list[str]] | None:
    """Return the fragment before the cursor and the words that may replace it.

    Return None off magic lines.

    Args:
        namespace: the notebook's variables.
        body: the lines below the magic's.
    """
    line = LINE.match(text.lstrip())
    if line is None or line[1] not in MAGICS:
        return None
    variables, rank_variables = (
        [name for name in namespace if not name.startswith("_")],
        _names_of_ranks(),
    )
    names = help.CompletionNames(
        pools=tuple(pool.name for pool in registry.pools()),
        leftovers=tuple(record.name for record in records.readable_records()),
        hosts=_hosts(),
        variables=tuple(variables),
        rank_variables=rank_variables,
        gathered=tuple({*rank_variables, *variables, *assigned(body)}),
        environment=tuple(os.environ),
        providers=("auto", *providers.names()),
        plugins=tuple(plugins.names()),
        plugin_options=plugins.options,
    )
    completions = help.complete(line[1], line[2], names)
    return re.split(r"[ \t=,]", line[2])[-1], completions


def assigned(body: str) -> set[str]:
    """Return the names that a cell sets, without modules.

    If the cell does not compile, names are found by a pattern.
    """
    try:
        modules = {
            (alias.asname or alias.name).partition(".")[0]
            for node in ast.walk(ast.parse(body))
            if isinstance(node, ast.Import | ast.ImportFrom)
            for alias in node.names
        }
        return {name for name in cell_names(body).stores - modules if not name.startswith("_")}
    except (SyntaxError, ValueError, RecursionError):
        targets = ASSIGNED.findall(body)
        return {
            name for names in targets for name in re.split(r"[,\s]+", names) if name.isidentifier()
        }


def _hosts() -> tuple[str, ...]:
    """Return the host names of ~/.ssh/config."""
    try:
        return aliases()
    except RequestError:  # the file may be invalid or half written
        return ()


def _names_of_ranks() -> tuple[str, ...]:
    """Return the variables of the most recently used pool."""
    try:
        return tuple(sorted(registry.pool_named(None).shipper.names()))
    except PoolError:  # no pool, or it is starting
        return ()
