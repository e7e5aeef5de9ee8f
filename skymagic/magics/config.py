"""Users' defaults. The only module that uses traitlets; all others see a frozen `Defaults`.

``%config SkyMagic.only = "all"`` and ``c.SkyMagic.idle = "30m"`` in a configuration file set them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

from traitlets import Any as AnyTrait
from traitlets import Bool, Enum, Float, Int, List, TraitError, Unicode, Union, observe, validate
from traitlets import Dict as DictTrait
from traitlets.config import Config, Configurable

from skymagic.errors import RequestError
from skymagic.magics.arguments.readers import dollars
from skymagic.magics.arguments.removed import REMOVED_SETTINGS
from skymagic.plan.requests import Defaults, cloud_settings, plugin_specs
from skymagic.plan.units import Selection, duration
from skymagic.pool import debugging
from skymagic.wire import debug_log

_BUILT_IN = Defaults()


class SkyMagic(Configurable):
    """Defaults of the magics, for options that a line omits."""

    provider = Unicode(
        _BUILT_IN.provider, help="Where pools run: auto, local, ssh, slurm, kubernetes, ray, aws."
    )
    plugins = List(
        Unicode(), help="Plugins of every pool, in the form of --plugin: ['torch:backend=gloo']."
    )
    only = Union(
        [Unicode(), Int(), List(Int())],
        default_value=_BUILT_IN.only.text,
        help="Show output of: head, all, 0,2 or 0:4; or a rank, or ranks.",
    )
    timeout: Any = AnyTrait(
        _BUILT_IN.timeout, help="Time limit of a cell: seconds or '10m'; None for no limit."
    )
    idle: Any = AnyTrait(
        _BUILT_IN.idle, help="Stop a pool after this time without a cell: seconds or '30m'."
    )
    max_lifetime: Any = AnyTrait(
        _BUILT_IN.max_lifetime, help="Stop a pool after this time in any case: seconds or '8h'."
    )
    max_price: Any = AnyTrait(
        _BUILT_IN.max_price,
        help="Most that a rented pool may cost per hour, in dollars; --max-price overrides "
        "it. None for no limit.",
    )
    away: Any = AnyTrait(
        _BUILT_IN.away,
        help="Remote machines stop a pool whose notebook is gone, this long after the last "
        "cell: seconds, '30m' or None.",
    )
    stall_after = Float(
        _BUILT_IN.stall_after,
        min=0.0,
        help="Seconds without progress after which a stalled cell is reported.",
    )
    view_after = Float(
        _BUILT_IN.view_after,
        min=0.0,
        help="Seconds after which a running cell shows its progress line; inf for never.",
    )
    buttons = Bool(
        _BUILT_IN.buttons,
        help="Show buttons (widgets) in the progress line. Without them, a notebook saved "
        "during a cell still displays the line.",
    )
    grace = Float(
        _BUILT_IN.grace, min=0.0, help="Seconds that an interrupted rank has before it is killed."
    )
    screen_limit = Int(
        _BUILT_IN.screen_limit,
        min=1,
        help="Bytes of output that one cell may show; the logs have everything.",
    )
    log_limit = Int(
        _BUILT_IN.log_limit,
        min=1_000_000,
        help="Maximum size of one rank's log in bytes, for new pools; the beginning of a "
        "longer log is dropped.",
    )

    log_level = Enum(
        debug_log.LEVELS,
        "",
        help="Write debug logs of skymagic's own processes, here and on the nodes, from this level "
        "on: DEBUG, INFO or WARNING; '' for none. %sky_logs --debug shows them. SKYMAGIC_LOG=DEBUG "
        "in the notebook's environment does the same.",
    )

    packages = Enum(
        ("sync", "ask", "off"),
        _BUILT_IN.packages,
        help="Packages missing on remote machines: install them (sync), refuse the cell "
        "(ask), or do nothing (off).",
    )

    aws = DictTrait(
        help="Settings of sky.AWS: {'profile': 'work', 'subnet': 'subnet-…', "
        "'use_private_ips': True}."
    )

    @validate("aws")
    def _check_aws(self, proposal: Any) -> dict[str, object]:
        _checked(cloud_settings, proposal["value"])
        return dict(proposal["value"])

    busy = Enum(
        ("wait", "refuse"),
        _BUILT_IN.busy,
        help="If another cell runs on the same ranks: wait for it, or refuse the cell.",
    )

    def update_config(self, config: Config) -> None:
        """Update the settings from `config`. Raises TraitError for a removed setting."""
        if refusals := removed_settings(config):
            raise TraitError("; ".join(refusals))
        super().update_config(config)

    @observe("log_level")
    def _set_log_level(self, change: Any) -> None:
        try:
            debugging.set_level(change["new"])
        except OSError as problem:
            raise TraitError(f"the debug log cannot be written: {problem}") from None

    @validate("plugins")
    def _check_plugins(self, proposal: Any) -> list[str]:
        return [str(spec) for text in proposal["value"] for spec in _checked(plugin_specs, text)]

    @validate("only")
    def _check_only(self, proposal: Any) -> str:
        return str(_checked(Selection.of, proposal["value"]))

    @validate("timeout", "idle", "max_lifetime", "away")
    def _check_duration(self, proposal: Any) -> float | None:
        value = proposal["value"]
        return None if value is None else float(_checked(duration, str(value)))

    @validate("max_price")
    def _check_price(self, proposal: Any) -> float | None:
        value = proposal["value"]
        return None if value is None else float(_checked(dollars, str(value)))

    def defaults(self) -> Defaults:
        """Return the current defaults."""
        values = {field.name: getattr(self, field.name) for field in fields(Defaults)}
        values["plugins"] = tuple(spec for text in self.plugins for spec in plugin_specs(text))
        values["only"] = Selection(self.only)
        values["aws"] = cloud_settings(self.aws)
        return Defaults(**values)


def removed_settings(config: Config) -> list[str]:
    """Return a line that names the replacement for each removed setting in `config`."""
    settings = config.get(SkyMagic.__name__, {})
    return [REMOVED_SETTINGS[name] for name in settings if name in REMOVED_SETTINGS]


for _trait in SkyMagic.class_own_traits().values():
    _trait.tag(config=True)


def _checked(read: Callable[[Any], Any], value: Any) -> Any:
    """Return `read(value)`; convert its mistakes to a TraitError."""
    try:
        return read(value)
    except (RequestError, TypeError, ValueError) as wrong:
        raise TraitError(str(wrong)) from None
