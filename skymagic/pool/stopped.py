"""Rented pools whose machines are stopped with their disks: found by name, and surveyed to be started again."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace

from skymagic import providers
from skymagic.errors import CloudError, PoolError, RequestError
from skymagic.plan.requests import Defaults, PoolRequest, missing_secrets
from skymagic.pool import keys, records, surveys
from skymagic.pool.keys import PoolKey
from skymagic.pool.records import PoolRecord
from skymagic.providers import Provider, Survey
from skymagic.providers.provider import Startable


def named(name: str | None) -> PoolRecord | None:
    """The record of a pool of this name whose machines are stopped; None where there is none."""
    return next((one for one in records.every() if one.name == name and one.stopped), None)


def surveyed(
    record: PoolRecord,
    request: PoolRequest,
    namespace: Mapping[str, object],
    defaults: Defaults,
    tell: Callable[[str], None],
) -> tuple[PoolKey, Provider, Survey]:
    """What was known of a stopped pool, and the provider and survey with which its machines are started again.

    Raises:
        PoolError: nothing is known of it, its provider starts none again, or its machines are gone.
        RequestError: the user does not want to pay for it, or there is nobody to ask.
    """
    key = keys.read(record.job_id)
    wanted = surveys.with_imports(replace(key.plan.request, yes=request.yes), namespace, defaults)
    if mistakes := missing_secrets(wanted.secrets, os.environ):
        raise RequestError(mistakes)
    provider = providers.serving(key.plan.request)
    if not isinstance(provider, Startable):
        raise PoolError(f"pools of --provider {key.plan.provider} cannot be started again")
    try:
        survey = provider.again(replace(key.plan, request=wanted), key.accesses, tell)
    except CloudError as problem:
        if problem.kind == "missing":
            records.remove(record.job_id)
        raise
    surveys.confirm(survey.plan)
    return key, provider, survey
