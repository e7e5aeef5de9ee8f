"""What machines with a GPU can be rented for, from all providers that rent any."""

from __future__ import annotations

from skymagic.plan.requests import CloudSettings, PoolRequest
from skymagic.providers.aws.clients import AwsClients
from skymagic.providers.aws.listing import OfferTable
from skymagic.providers.aws.market import survey


def offers(request: PoolRequest, settings: CloudSettings) -> OfferTable:
    """What can be rented for a request, whatever limits of the price say; nothing is rented.

    Raises:
        RequestError: no machine serves it.
        CloudError: no credentials, or they are refused.
    """
    clients = AwsClients.of(settings)
    return OfferTable(survey(request, clients), request.nodes or 1)
