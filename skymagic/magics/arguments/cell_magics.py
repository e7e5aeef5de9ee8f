"""``%%sky_broadcast`` and ``%%sky_sh``: a cell on the ranks, or on the nodes."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from skymagic.magics.arguments.options import PLUGINS
from skymagic.magics.arguments.pool_magic import NO_DEFAULTS, POOL_FIELDS, check_environment, pool_of
from skymagic.magics.arguments.reading import ParsedLine
from skymagic.plan.requests import PROVIDERS, Defaults, PoolRequest, RunRequest, ShellRequest
from skymagic.plan.units import Selection


def parse_broadcast(
    line: str,
    defaults: Defaults = NO_DEFAULTS,
    *,
    plugins: Collection[str] = PLUGINS,
    providers: Collection[str] = PROVIDERS,
) -> RunRequest:
    """``%%sky_broadcast [options of the run and of a pool]``. Raises RequestError with all mistakes."""
    parsed = ParsedLine("sky_broadcast", line)
    values = parsed.values
    pool = pool_of(parsed, defaults, plugins, providers, name=values.get("name"))
    parsed.check(
        values.get("head") and not parsed.labels.keys() & {"output", "gather"},
        "--head keeps one value of -o or -g: add -o NAME or -g NAMES",
    )
    return _run(parsed, pool, {"only": defaults.only, "timeout": defaults.timeout, "busy": defaults.busy})


def parse_run(line: str, defaults: Defaults = NO_DEFAULTS) -> RunRequest:
    """``%%sky_run [-t RANKS] [options]``, an older name: `targets` is None for the next rank in turn; its output is shown, its value is no list.

    Raises RequestError with all mistakes.
    """
    request = parse_broadcast(line, replace(defaults, only=Selection("all")))
    return replace(request, head=request.targets is None or re.fullmatch(r"-?\d+", request.targets.text) is not None)


def _run(line: ParsedLine, pool: PoolRequest, configured: Mapping[str, Any]) -> RunRequest:
    """The run of a line, after the checks that need several options."""
    values = {key: value for key, value in line.values.items() if key not in POOL_FIELDS | {"name"}}
    push, held = values.get("push", ()), values.get("no_push", False)
    both = [name for name in push if isinstance(held, tuple) and name in held]
    line.check(both, f"{', '.join(both)}: named by --push and by --no-push; keep one of them")
    line.check(values.get("fresh") and held is True and not push, "--fresh sends again what --no-push does not send")
    line.check(values.get("noblock") and values.get("dry_run"), "--noblock has no meaning with --dry-run")
    line.check(
        values.get("output") in values.get("gather", ()),
        f"{values.get('output')}: -o and -g would both set it; choose another name for -o",
    )
    if values.get("profile") is True:
        values["profile"] = Selection("head")
    line.check(values.get("profile") and values.get("noblock"), "--profile has no meaning with --noblock")
    line.done()
    return RunRequest(pool=pool, **{**configured, **values})


def parse_sh(line: str, defaults: Defaults = NO_DEFAULTS) -> ShellRequest:
    """``%%sky_sh [--workdir DIR] [options of the run]``. Raises RequestError with all mistakes."""
    parsed = ParsedLine("sky_sh", line)
    check_environment(parsed)
    parsed.done()
    values = {"only": defaults.only, "timeout": defaults.timeout, "busy": defaults.busy, **parsed.values}
    values["pool"] = values.pop("name", None)
    return ShellRequest(**values)
