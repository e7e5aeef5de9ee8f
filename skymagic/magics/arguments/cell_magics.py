"""Parse ``%sky_pool``, ``%%sky_broadcast`` and ``%%sky_sh``.

The line of a cell on ranks or nodes may also describe the pool.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from skymagic.errors import RequestError, collect_mistakes
from skymagic.magics.arguments.options import DRY_RUN, PLUGINS, POOL, Arity, Option
from skymagic.magics.arguments.parsing import ParsedLine, ParsedOption
from skymagic.magics.arguments.readers import variable
from skymagic.plan.image import Image
from skymagic.plan.requests import (
    AUTO,
    PROVIDERS,
    Defaults,
    PluginSpec,
    PoolRequest,
    RunRequest,
    ShellRequest,
    no_provider,
)
from skymagic.plan.suggest import did_you_mean
from skymagic.plan.units import Selection

NO_DEFAULTS = Defaults()
SLURM_OPTIONS = (
    "account",
    "partition",
    "qos",
    "time",
    "constraint",
    "gres",
    "reservation",
    "exclusive",
)
"""Pool options passed to sbatch under their own names, in one field of the request."""
KUBERNETES_OPTIONS = {
    "container_image": "image",
    "namespace": "namespace",
    "context": "context",
    "pod_template": "pod-template",
    "pods": "pods",
}
"""Kubernetes options by field; one field of the request holds them all."""
POOL_FIELDS = frozenset(option.field for option in POOL)


def parse_pool(
    line: str,
    defaults: Defaults = NO_DEFAULTS,
    *,
    body: str | None = None,
    plugins: Collection[str] = PLUGINS,
    providers: Collection[str] = PROVIDERS,
) -> PoolRequest:
    """Parse ``%sky_pool [NAME] [options]``, or ``%%sky_pool`` with a `body` of TOML options.

    In TOML the options' long names are keys, and ``[env]`` and ``[plugins.NAME]`` may be tables.
    `plugins` and `providers` are the existing names. Raises RequestError with all mistakes of line
    and body.
    """
    options, names, mistakes = scan_body(body) if body else ([], [], [])
    parsed = ParsedLine("sky_pool", line, options, names)
    parsed.mistakes += mistakes
    request = pool_of(parsed, defaults, plugins, providers, name=parsed.values.get("name"))
    parsed.raise_mistakes()
    return request


def pool_of(
    line: ParsedLine,
    defaults: Defaults,
    plugins: Collection[str],
    providers: Collection[str],
    *,
    name: str | None,
) -> PoolRequest:
    """Return the pool request of a line.

    The line's options are checked against the existing names; omitted options take the configured
    defaults.
    """
    configured = {
        key: getattr(defaults, key)
        for key in ("provider", "plugins", "idle", "max_lifetime", "max_price")
    }
    stated = {key: value for key, value in line.values.items() if key in POOL_FIELDS}
    labels = {
        key: line.labels.get(key, f"%config SkyMagic.{key}") for key in ("provider", "plugins")
    }
    values = {**configured, **stated}
    if values["provider"] != AUTO and values["provider"] not in providers:
        line.mistakes.append(f"{labels['provider']}: {no_provider(values['provider'], providers)}")
    names = [spec.name for spec in values["plugins"]]
    line.mistakes += [f"{labels['plugins']}: {mistake}" for mistake in _unknown(names, plugins)]
    line.mistakes += [
        f"{labels['plugins']}: {again} is given twice; keep one of them"
        for again in _repeated_names(names)
    ]
    check_environment(line)
    if "pip" in values:
        try:
            Image(pip=values["pip"])
        except RequestError as wrong:
            line.mistakes += [
                f"{line.labels['pip']}: {mistake.removeprefix('pip: ')}"
                for mistake in wrong.mistakes
            ]
    if (cluster_options := [name for name in SLURM_OPTIONS if name in stated]) or stated.get(
        "slurm"
    ):
        options = [
            (name, "" if stated[name] is True else str(stated[name])) for name in cluster_options
        ]
        values = {key: value for key, value in values.items() if key not in cluster_options}
        values["slurm"] = (*options, *stated.get("slurm", ()))
        stated = {
            **{key: value for key, value in stated.items() if key not in cluster_options},
            "slurm": (),
        }
    if cluster_options := [name for name in KUBERNETES_OPTIONS if name in stated]:
        values = {key: value for key, value in values.items() if key not in cluster_options}
        values["kubernetes"] = tuple(
            (KUBERNETES_OPTIONS[name], stated[name]) for name in cluster_options
        )
        stated = {
            **{key: value for key, value in stated.items() if key not in cluster_options},
            "kubernetes": (),
        }
    dry_run = bool(line.values.get("dry_run"))
    request = PoolRequest(
        **values, cloud=defaults.aws, name=name, dry_run=dry_run, stated=frozenset(stated)
    )
    if (label := line.labels.get("procs_per_node", "")).endswith(
        "ranks"
    ) and request.provider in providers:
        line.mistakes += request.ranks_mistakes(label)
        request = replace(request, nodes=1, stated=request.stated_fields() | {"nodes"})
    return request


def check_environment(line: ParsedLine) -> None:
    """Note the variables of --env and --secret that have several values."""
    keys = [key for key, _ in line.values.get("env", ())]
    line.mistakes += [
        f"{line.labels['env']}: {key} has several values; keep one of them"
        for key in _repeated_names(keys)
    ]
    line.mistakes += [
        f"{key} is both an --env and a --secret; keep one of them"
        for key in dict.fromkeys(keys)
        if key in line.values.get("secrets", ())
    ]


def _unknown(names: Iterable[str], options: Collection[str]) -> list[str]:
    return [
        f"no plugin is called {name!r}"
        + (did_you_mean(name, options) or f"; available: {', '.join(options)}")
        for name in dict.fromkeys(names)
        if name not in options
    ]


def _repeated_names(names: Sequence[str]) -> list[str]:
    return [name for name in dict.fromkeys(names) if names.count(name) > 1]


# -- cells -----------------------------------------------------------------------------------------


def parse_broadcast(
    line: str,
    defaults: Defaults = NO_DEFAULTS,
    *,
    plugins: Collection[str] = PLUGINS,
    providers: Collection[str] = PROVIDERS,
) -> RunRequest:
    """Parse ``%%sky_broadcast [options of the run and of a pool]``.

    Raises RequestError with all mistakes.
    """
    parsed = ParsedLine("sky_broadcast", line)
    values = parsed.values
    pool = pool_of(parsed, defaults, plugins, providers, name=values.get("name"))
    parsed.check(
        values.get("head") and not parsed.labels.keys() & {"output", "gather"},
        "--head keeps one value of -o or -g: add -o NAME or -g NAMES",
    )
    return _run(
        parsed, pool, {"only": defaults.only, "timeout": defaults.timeout, "busy": defaults.busy}
    )


def _run(line: ParsedLine, pool: PoolRequest, configured: Mapping[str, Any]) -> RunRequest:
    """Return the run request of a line, after the checks that need several options."""
    values = {key: value for key, value in line.values.items() if key not in POOL_FIELDS | {"name"}}
    push, no_push = values.get("push", ()), values.get("no_push", False)
    conflicting = [name for name in push if isinstance(no_push, tuple) and name in no_push]
    line.check(
        conflicting, f"{', '.join(conflicting)}: named by --push and by --no-push; keep one of them"
    )
    line.check(
        values.get("fresh") and no_push is True and not push,
        "--fresh sends again what --no-push does not send",
    )
    line.check(
        values.get("noblock") and values.get("dry_run"), "--noblock has no meaning with --dry-run"
    )
    line.check(
        values.get("output") in values.get("gather", ()),
        f"{values.get('output')}: -o and -g would both set it; choose another name for -o",
    )
    if values.get("profile") is True:
        values["profile"] = Selection("head")
    line.check(
        values.get("profile") and values.get("noblock"), "--profile has no meaning with --noblock"
    )
    line.raise_mistakes()
    return RunRequest(pool=pool, **{**configured, **values})


def parse_sh(line: str, defaults: Defaults = NO_DEFAULTS) -> ShellRequest:
    """Parse ``%%sky_sh [--workdir DIR] [options of the run]``.

    Raises RequestError with all mistakes.
    """
    parsed = ParsedLine("sky_sh", line)
    check_environment(parsed)
    parsed.check(
        parsed.values.get("nodes") and parsed.values.get("rank"),
        f"{parsed.labels.get('rank')} chooses a rank and {parsed.labels.get('nodes')} "
        "nodes; keep one of them",
    )
    parsed.check(
        parsed.values.get("only") and parsed.values.get("rank"),
        "--only chooses among nodes, and with -t the script runs on one; leave --only out",
    )
    parsed.raise_mistakes()
    values = {
        "only": defaults.only,
        "timeout": defaults.timeout,
        "busy": defaults.busy,
        **parsed.values,
    }
    values["pool"] = values.pop("name", None)
    return ShellRequest(**values)


# -- The body of ``%%sky_pool``: TOML whose keys are the options' long names -----------------------


def scan_body(body: str) -> tuple[list[ParsedOption], list[str], list[str]]:
    """Return (options, the pool's name if present, mistakes) of a TOML body."""
    try:
        table = tomllib.loads(body)
    except (ValueError, RecursionError) as wrong:
        # ValueError also for numbers with thousands of digits
        return [], [], [f"the cell is not TOML: {wrong}"]
    options_by_name = {
        name.lstrip("-"): option for option in (*POOL, DRY_RUN) for name in option.spellings
    }
    options: list[ParsedOption] = []
    mistakes: list[str] = []
    name = table.pop("name", "")
    if not isinstance(name, str):
        mistakes.append("name takes a string")
    for key, value in table.items():
        option = options_by_name.get(key.replace("_", "-"))
        if option is None:
            mistakes.append(f"{key}: no such key{did_you_mean(key, [*options_by_name, 'name'])}")
            continue
        with collect_mistakes(mistakes):
            options += _entry(option, key, value)
    return options, [name] if name and isinstance(name, str) else [], mistakes


def _entry(option: Option, key: str, value: object) -> list[ParsedOption]:
    """Return the options that a TOML value sets.

    Raises RequestError for a type that the option does not accept.
    """
    several = option.arity is not Arity.ONE
    text = _scalar(value)
    if option.read is None and isinstance(value, bool):
        return [ParsedOption(option, key, None)] if value else []
    if option.read is not None and text is not None and not isinstance(value, bool):
        return [ParsedOption(option, key, text)]
    if several and isinstance(value, list) and all(isinstance(item, str) for item in value):
        return [ParsedOption(option, key, item) for item in value]
    if option.field in _TABLES and isinstance(value, dict):
        return [
            ParsedOption(
                option, key, None, (_TABLES[option.field](f"{key}.{inner}", inner, value[inner]),)
            )
            for inner in value
        ]
    takes = "a string or a list of strings" if several else "a string or a number"
    table = " or a table" if option.field in _TABLES else ""
    raise RequestError(f"{key} takes {'true or false' if option.read is None else takes}{table}")


def _env_entry(label: str, name: str, value: object) -> tuple[str, str]:
    text = _scalar(value)
    if text is None:
        raise RequestError(f"{label} takes a string")
    return variable(name), text


def _plugin_entry(label: str, name: str, value: object) -> PluginSpec:
    options = (
        {key: _scalar(inner) for key, inner in value.items()} if isinstance(value, dict) else None
    )
    if options is None or None in options.values():
        raise RequestError(f"{label} takes a table of strings: [{label}]")
    return PluginSpec(name, {key: str(text) for key, text in options.items()})


_TABLES: dict[str, Callable[[str, str, object], Any]] = {
    "env": _env_entry,
    "plugins": _plugin_entry,
}


def _scalar(value: object) -> str | None:
    """Return a TOML string, number or boolean as text, or None for anything else."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        # Python refuses to print thousands of digits
        return f"{value}" if value.bit_length() <= 64 else None
    return str(value) if isinstance(value, str | float) else None
