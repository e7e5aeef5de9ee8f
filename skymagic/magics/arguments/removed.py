"""Removed magics, options and settings, each with a line that names its replacement."""

from __future__ import annotations

REMOVED_MAGICS: dict[str, str] = {
    "sky_clean": "%sky_clean was removed: use %sky_down --clean --hosts HOSTS",
    "sky_cost": "%sky_cost was removed: use %sky_status --cost",
    "sky_run": "%%sky_run was removed: %%sky_broadcast -t RANK runs a cell on one rank",
    "sky_shell": "%sky_shell was removed: run the command in a cell that begins with "
    "%%sky_sh -t RANK",
}
"""Maps a name without ``%`` to the message for the user."""
REMOVED_OPTIONS: dict[str, str] = {}
"""Maps an option, with its dashes, to the message that follows its name."""
REMOVED_SETTINGS: dict[str, str] = {
    "tracker": "SkyMagic.tracker was removed: write to the tracker on rank 0, as "
    "docs/how-to/trackers.md shows",
}
"""Maps a setting of ``%config SkyMagic.…`` to the message for the user."""
