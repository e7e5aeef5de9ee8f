"""The body of ``%%sky_pool``: TOML whose keys are the options' long names."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from typing import Any

from skymagic.errors import RequestError
from skymagic.magics.arguments.options import DRY_RUN, POOL, Option
from skymagic.magics.arguments.readers import variable
from skymagic.magics.arguments.reading import ParsedOption
from skymagic.plan.requests import PluginSpec
from skymagic.plan.suggest import did_you_mean


def scan_body(body: str) -> tuple[list[ParsedOption], list[str], list[str]]:
    """(options given, the pool's name if it stands there, mistakes) of a TOML body."""
    try:
        table = tomllib.loads(body)
    except (ValueError, RecursionError) as wrong:  # a ValueError too where a number has thousands of digits
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
        try:
            given += _entry(option, key, value)
        except RequestError as wrong:
            mistakes += wrong.mistakes
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
            ParsedOption(option, key, None, (_TABLES[option.field](f"{key}.{inner}", inner, value[inner]),))
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
    options = {key: _scalar(inner) for key, inner in value.items()} if isinstance(value, dict) else None
    if options is None or None in options.values():
        raise RequestError(f"{label} takes a table of strings: [{label}]")
    return PluginSpec(name, {key: str(text) for key, text in options.items()})


_TABLES: dict[str, Callable[[str, str, object], Any]] = {"env": _env_entry, "plugins": _plugin_entry}


def _scalar(value: object) -> str | None:
    """A TOML string, number or truth value as text; None for anything else."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return f"{value}" if value.bit_length() <= 64 else None  # thousands of digits have no text in Python
    return str(value) if isinstance(value, str | float) else None
