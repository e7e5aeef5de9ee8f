"""Magics, options and settings of earlier versions that no longer exist: for each, the line that names its replacement."""

from __future__ import annotations

REMOVED_MAGICS: dict[str, str] = {
    "sky_clean": "%sky_clean was removed: use %sky_down --clean --hosts HOSTS",
    "sky_cost": "%sky_cost was removed: use %sky_status --cost",
    "sky_run": "%%sky_run was removed: %%sky_broadcast -t RANK runs a cell on one rank",
    "sky_shell": "%sky_shell was removed: run the command in a cell that begins with %%sky_sh -t RANK",
}
"""Name without ``%`` → what the user is told."""
REMOVED_OPTIONS: dict[str, str] = {}
"""Option as it was written, with its dashes → what the user is told after its name."""
REMOVED_SETTINGS: dict[str, str] = {
    "tracker": "SkyMagic.tracker was removed: write to the tracker on rank 0, as docs/how-to/trackers.md shows",
}
"""Name of a setting of ``%config SkyMagic.…`` → what the user is told."""
