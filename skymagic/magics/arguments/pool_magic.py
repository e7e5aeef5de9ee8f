"""``%sky_pool`` and ``%%sky_pool``; and the pool that a cell's own line describes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from skymagic.errors import RequestError
from skymagic.magics.arguments.options import PLUGINS, POOL
from skymagic.magics.arguments.reading import ParsedLine
from skymagic.magics.arguments.toml import scan_body
from skymagic.plan.image import Image
from skymagic.plan.requests import PROVIDERS, Defaults, PoolRequest, no_provider
from skymagic.plan.suggest import did_you_mean

NO_DEFAULTS = Defaults()
SLURM_OPTIONS = ("account", "partition", "qos", "time", "constraint", "gres", "reservation", "exclusive")
"""Options of a pool that are sbatch's, under their own names; together they are one field of the request."""
KUBERNETES_OPTIONS = {
    "container_image": "image",
    "namespace": "namespace",
    "context": "context",
    "pod_template": "pod-template",
    "pods": "pods",
}
"""Those of Kubernetes, by their fields; together they are one as well."""
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
    line: ParsedLine, defaults: Defaults, plugins: Collection[str], providers: Collection[str], *, name: str | None
) -> PoolRequest:
    """The pool of a line; what was said of it is checked against what is known, the rest is configured."""
    configured = {key: getattr(defaults, key) for key in ("provider", "plugins", "idle", "max_lifetime", "max_price")}
    stated = {key: value for key, value in line.values.items() if key in POOL_FIELDS}
    labels = {key: line.labels.get(key, f"%config SkyMagic.{key}") for key in ("provider", "plugins")}
    values = {**configured, **stated}
    if values["provider"] not in providers:
        line.mistakes.append(f"{labels['provider']}: {no_provider(values['provider'], providers)}")
    names = [spec.name for spec in values["plugins"]]
    line.mistakes += [f"{labels['plugins']}: {mistake}" for mistake in _unknown(names, plugins)]
    line.mistakes += [f"{labels['plugins']}: {again} is given twice; keep one of them" for again in _repeated(names)]
    check_environment(line)
    try:
        Image(pip=values.get("pip", ()))
    except RequestError as wrong:
        line.mistakes += [f"{line.labels['pip']}: {mistake.removeprefix('pip: ')}" for mistake in wrong.mistakes]
    if (told := [name for name in SLURM_OPTIONS if name in stated]) or stated.get("slurm"):
        options = [(name, "" if stated[name] is True else str(stated[name])) for name in told]
        values = {key: value for key, value in values.items() if key not in told}
        values["slurm"] = (*options, *stated.get("slurm", ()))
        stated = {**{key: value for key, value in stated.items() if key not in told}, "slurm": ()}
    if told := [name for name in KUBERNETES_OPTIONS if name in stated]:
        values = {key: value for key, value in values.items() if key not in told}
        values["kubernetes"] = tuple((KUBERNETES_OPTIONS[name], stated[name]) for name in told)
        stated = {**{key: value for key, value in stated.items() if key not in told}, "kubernetes": ()}
    dry_run = bool(line.values.get("dry_run"))
    request = PoolRequest(**values, cloud=defaults.aws, name=name, dry_run=dry_run, stated=frozenset(stated))
    if (label := line.labels.get("procs_per_node", "")).endswith("ranks") and request.provider in providers:
        line.mistakes += request.ranks_mistakes(label)
        request = replace(request, nodes=1, stated=request.given() | {"nodes"})
    return request


def check_environment(line: ParsedLine) -> None:
    """Note the variables of --env and --secret that have several values."""
    keys = [key for key, _ in line.values.get("env", ())]
    line.mistakes += [f"{line.labels['env']}: {key} has several values; keep one of them" for key in _repeated(keys)]
    line.mistakes += [
        f"{key} is both an --env and a --secret; keep one of them"
        for key in dict.fromkeys(keys)
        if key in line.values.get("secrets", ())
    ]


def _unknown(names: Iterable[str], known: Collection[str]) -> list[str]:
    return [
        f"no plugin is called {name!r}" + (did_you_mean(name, known) or f"; available: {', '.join(known)}")
        for name in dict.fromkeys(names)
        if name not in known
    ]


def _repeated(names: Sequence[str]) -> list[str]:
    return [name for name in dict.fromkeys(names) if names.count(name) > 1]
