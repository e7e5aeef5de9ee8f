"""What machines with a GPU can be rented for, from all providers that rent any."""

from __future__ import annotations

from skymagic.plan.requests import PoolRequest
from skymagic.providers.aws.clients import Clients
from skymagic.providers.aws.configured import configured
from skymagic.providers.aws.listing import OfferTable
from skymagic.providers.aws.market import survey


def rentable() -> bool:
    """Whether a provider that rents machines is set up here."""
    return configured()


def offers(request: PoolRequest) -> OfferTable:
    """What can be rented for a request, whatever quotas and limits of the price say; nothing is rented.

    Raises:
        RequestError: no machine serves it.
        CloudError: no credentials, or they are refused.
    """
    return OfferTable(survey(request, Clients()), request.nodes or 1)
