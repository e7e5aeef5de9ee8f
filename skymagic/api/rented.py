"""What is rented, ended from any machine with the user's credentials, by its tags alone."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from skymagic.errors import CloudError, PoolError
from skymagic.plan.cloud import CloudSettings

_VARIABLES = (
    "AWS_ACCESS_KEY_ID", "AWS_PROFILE", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)  # fmt: skip


def configured() -> bool:
    """Whether this machine looks as if it had AWS credentials; nothing is imported, and nobody is asked."""
    files = (("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials"), ("AWS_CONFIG_FILE", "~/.aws/config"))
    return any(map(os.environ.get, _VARIABLES)) or any(
        Path(os.environ.get(name, default)).expanduser().is_file() for name, default in files
    )


def stop_with_the_rest(say: Callable[[str], None], settings: CloudSettings) -> list[str]:
    """As `stop`, for who ends all pools and may have rented nothing: without credentials that are good, only a line says so."""
    if not configured():
        return []
    try:
        return stop(say, settings)
    except CloudError as problem:
        if problem.kind != "credentials":
            raise
        return [f"what is rented from EC2 was not looked for: {problem.reason}"]


def stop(say: Callable[[str], None], settings: CloudSettings = CloudSettings()) -> list[str]:  # noqa: B008  # it is frozen
    """End all machines that the user has rented, in all regions, with all that was made for them.

    Returns:
        What was done, in lines.

    Raises:
        PoolError: something is left, or nobody could be asked; names it.
    """
    from skymagic.providers.aws import sweep
    from skymagic.providers.aws.clients import Clients

    clients = Clients(settings.profile, settings.endpoint_url, settings.patience)
    ended: list[str] = []

    def heard(text: str) -> None:
        ended.append(text)
        say(text)

    problems = sweep.release_everything(clients, heard)
    if problems:
        raise PoolError("not everything that is rented was ended:\n  " + "\n  ".join(problems))
    return ["all of it is terminated"] if ended else ["nothing is rented from EC2"]
