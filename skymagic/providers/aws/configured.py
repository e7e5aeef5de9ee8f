"""Whether somebody has set up AWS on this machine: asked without a call, for boto3 itself asks the network at the end."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from skymagic.plan.requests import CloudSettings

VARIABLES = (
    "AWS_ACCESS_KEY_ID", "AWS_PROFILE", "AWS_DEFAULT_PROFILE", "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)  # fmt: skip
FILES = {"AWS_SHARED_CREDENTIALS_FILE": "credentials", "AWS_CONFIG_FILE": "config"}
"""Variable that names a file of boto3's → its name in ~/.aws."""


def set_up(settings: CloudSettings) -> bool:
    """Whether AWS can be turned to without having been named: it is configured here, or the user has made settings for it."""
    return configured() or settings != CloudSettings()


def configured(environ: Mapping[str, str] = os.environ, home: Path | None = None) -> bool:
    """Whether the environment or a file names credentials or a profile; a machine's own role on EC2 does not count.

    Args:
        environ: the notebook's environment.
        home: the user's folder.
    """
    if any(environ.get(name) for name in VARIABLES):
        return True
    folder = (home or Path.home()) / ".aws"
    return any(Path(environ.get(name) or folder / file).is_file() for name, file in FILES.items())
