"""``%sky_pool``, ``%%sky_broadcast`` and ``%%sky_sh``: a pool, and a cell on its ranks or nodes, whose own line may describe the pool."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from skymagic.errors import RequestError, noted_in
from skymagic.magics.arguments.options import DRY_RUN, PLUGINS, POOL, Option
from skymagic.magics.arguments.readers import variable
from skymagic.magics.arguments.reading import ParsedLine, ParsedOption
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
"""Options of a pool that are sbatch's, under their own names; together they are one field of the request."""
KUBERNETES_OPTIONS = {
    "container_image": "image",
    "namespace": "namespace",
    "context": "context",
    "pod_template": "pod-template",
    "pods": "pods",
}
"""Options of Kubernetes, by their fields; together they are one as well."""
POOL_FIELDS = frozenset(option.field for option in POOL)


def parse_pool(
    line: str,
    defaults: Defaults = NO_DEFAULTS,
    *,
    body: str | None = None,
    plugins: Collection[str] = PLUGINS,
    providers: Collection[str] = PROVIDERS,
) -> PoolRequest:
    """``%sky_pool [NAME] [options]``, and with `body` ``%%sky_pool``, whose TOML adds to the line.

    In TOML the options' long names are keys, and ``[env]`` and ``[plugins.NAME]`` may be tables. `plugins` and `providers`
    are the names that exist. Raises RequestError with all mistakes of line and body.
    """
    given, names, mistakes = scan_body(body) if body else ([], [], [])
    parsed = ParsedLine("sky_pool", line, given, names)
    parsed.mistakes += mistakes
    request = pool_of(parsed, defaults, plugins, providers, name=parsed.values.get("name"))
    parsed.done()
    return request


def pool_of(
    line: ParsedLine,
    defaults: Defaults,
    plugins: Collection[str],
    providers: Collection[str],
    *,
    name: str | None,
) -> PoolRequest:
    """The pool of a line; what was said of it is checked against what is known, the rest is configured."""
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
        for again in _repeated(names)
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
    if (told := [name for name in SLURM_OPTIONS if name in stated]) or stated.get("slurm"):
        options = [(name, "" if stated[name] is True else str(stated[name])) for name in told]
        values = {key: value for key, value in values.items() if key not in told}
        values["slurm"] = (*options, *stated.get("slurm", ()))
        stated = {**{key: value for key, value in stated.items() if key not in told}, "slurm": ()}
    if told := [name for name in KUBERNETES_OPTIONS if name in stated]:
        values = {key: value for key, value in values.items() if key not in told}
        values["kubernetes"] = tuple((KUBERNETES_OPTIONS[name], stated[name]) for name in told)
        stated = {
            **{key: value for key, value in stated.items() if key not in told},
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
        request = replace(request, nodes=1, stated=request.given() | {"nodes"})
    return request


def check_environment(line: ParsedLine) -> None:
    """Note the variables of --env and --secret that have several values."""
    keys = [key for key, _ in line.values.get("env", ())]
    line.mistakes += [
        f"{line.labels['env']}: {key} has several values; keep one of them"
        for key in _repeated(keys)
    ]
    line.mistakes += [
        f"{key} is both an --env and a --secret; keep one of them"
        for key in dict.fromkeys(keys)
        if key in line.values.get("secrets", ())
    ]


def _unknown(names: Iterable[str], known: Collection[str]) -> list[str]:
    return [
        f"no plugin is called {name!r}"
        + (did_you_mean(name, known) or f"; available: {', '.join(known)}")
        for name in dict.fromkeys(names)
        if name not in known
    ]


def _repeated(names: Sequence[str]) -> list[str]:
    return [name for name in dict.fromkeys(names) if names.count(name) > 1]


# -- cells ----------------------------------------------------------------------------------------------------------------


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
    return _run(
        parsed, pool, {"only": defaults.only, "timeout": defaults.timeout, "busy": defaults.busy}
    )


def _run(line: ParsedLine, pool: PoolRequest, configured: Mapping[str, Any]) -> RunRequest:
    """The run of a line, after the checks that need several options."""
    values = {key: value for key, value in line.values.items() if key not in POOL_FIELDS | {"name"}}
    push, held = values.get("push", ()), values.get("no_push", False)
    both = [name for name in push if isinstance(held, tuple) and name in held]
    line.check(both, f"{', '.join(both)}: named by --push and by --no-push; keep one of them")
    line.check(
        values.get("fresh") and held is True and not push,
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
    line.done()
    return RunRequest(pool=pool, **{**configured, **values})


def parse_sh(line: str, defaults: Defaults = NO_DEFAULTS) -> ShellRequest:
    """``%%sky_sh [--workdir DIR] [options of the run]``. Raises RequestError with all mistakes."""
    parsed = ParsedLine("sky_sh", line)
    check_environment(parsed)
    parsed.check(
        parsed.values.get("nodes") and parsed.values.get("rank"),
        f"{parsed.labels.get('rank')} chooses a rank and {parsed.labels.get('nodes')} nodes; keep one of them",
    )
    parsed.check(
        parsed.values.get("only") and parsed.values.get("rank"),
        "--only chooses among nodes, and with -t the script runs on one; leave --only out",
    )
    parsed.done()
    values = {
        "only": defaults.only,
        "timeout": defaults.timeout,
        "busy": defaults.busy,
        **parsed.values,
    }
    values["pool"] = values.pop("name", None)
    return ShellRequest(**values)


# -- The body of ``%%sky_pool``: TOML whose keys are the options' long names -------------------------------------------


def scan_body(body: str) -> tuple[list[ParsedOption], list[str], list[str]]:
    """(options given, the pool's name if it stands there, mistakes) of a TOML body."""
    try:
        table = tomllib.loads(body)
    except (
        ValueError,
        RecursionError,
    ) as wrong:  # a ValueError too where a number has thousands of digits
        return [], [], [f"the cell is not TOML: {wrong}"]
    known = {name.lstrip("-"): option for option in (*POOL, DRY_RUN) for name in option.spellings}
    given: list[ParsedOption] = []
    mistakes: list[str] = []
    name = table.pop("name", "")
    if not isinstance(name, str):
        mistakes.append("name takes a string")
    for key, value in table.items():
        option = known.get(key.replace("_", "-"))
        if option is None:
            mistakes.append(f"{key}: no such key{did_you_mean(key, [*known, 'name'])}")
            continue
        with noted_in(mistakes):
            given += _entry(option, key, value)
    return given, [name] if name and isinstance(name, str) else [], mistakes


def _entry(option: Option, key: str, value: object) -> list[ParsedOption]:
    """What a TOML value says of its option. Raises RequestError when it is of a type that the option does not take."""
    several = option.takes != "one"
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
    """A TOML string, number or truth value as text; None for anything else."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return (
            f"{value}" if value.bit_length() <= 64 else None
        )  # thousands of digits have no text in Python
    return str(value) if isinstance(value, str | float) else None
