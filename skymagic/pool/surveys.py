"""From a request to a plan that may be carried out: the provider that serves it is asked, and the user, where it costs something."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from skymagic import plugins, providers
from skymagic.data.capture.loaded import imported_modules
from skymagic.display.live import confirmed
from skymagic.errors import RequestError
from skymagic.plan.plans import Plan
from skymagic.plan.requests import Defaults, PoolRequest, missing_secrets
from skymagic.pool.reuse import RENTED
from skymagic.providers import Provider, Survey


def preview(
    request: PoolRequest,
    tell: Callable[[str], None],
    namespace: Mapping[str, object] = MappingProxyType({}),
    defaults: Defaults = Defaults(),  # noqa: B008  # it is frozen
) -> Plan:
    """What `making.ensure` would make; nothing is started.

    Raises:
        RequestError: all mistakes of the request.
    """
    _, survey = surveyed(with_imports(providers.placed(request), namespace, defaults), tell)
    survey.close()
    return survey.plan


def with_imports(request: PoolRequest, namespace: Mapping[str, object], defaults: Defaults) -> PoolRequest:
    """The request with what the notebook uses by now, where other machines are to have it."""
    if request.here or defaults.packages != "sync":
        return request
    return replace(request, imports=imported_modules(namespace, str(Path.cwd())))


def surveyed(request: PoolRequest, tell: Callable[[str], None]) -> tuple[Provider, Survey]:
    """The provider that serves a request, and what it found. Raises RequestError with all mistakes."""
    mistakes = missing_secrets(request.secrets, os.environ)
    for words in plugins.beside(
        {request.provider, *(spec.name for spec in request.plugins)}, Path.cwd()
    ):  # before its code runs
        tell(words)
    provider = providers.serving(request)
    try:
        survey = provider.plan(request, tell)
    except RequestError as refused:
        raise RequestError([*mistakes, *refused.mistakes]) from None
    if mistakes:
        survey.close()
        raise RequestError(mistakes)
    if (apt := survey.plan.image.apt) and request.provider not in RENTED:
        tell(f"apt ({', '.join(apt)}) is for rented machines: on these nothing of it is installed")
    return provider, survey


def confirm(plan: Plan) -> None:
    """Ask before money is spent, or what is out of the ordinary is made; -y leaves no question in the plan.

    Raises:
        RequestError: the answer was no, or there is nobody to ask.
    """
    if plan.question and not confirmed(plan.question):
        raise RequestError(f"{plan.question}: add -y if you mean that")
