"""Nothing is paid for by accident: random histories of faults, interrupts and deaths; benchmarks/rented_leaks.py has a thousand of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings

from skymagic.providers.aws.clients import AwsClients
from tests.lab import ec2 as lab
from tests.lab.ec2 import EC2, ec2
from tests.lab.rented_histories import SETTINGS, History, histories, live


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[EC2, AwsClients]]:
    with pytest.MonkeyPatch.context() as patch, ec2() as made:
        for name, value in {
            **lab.environment(),
            "XDG_STATE_HOME": str(tmp_path_factory.mktemp("state")),
        }.items():
            patch.setenv(name, value)
        yield made, AwsClients(endpoint_url=made.url, deadline_factor=SETTINGS.deadline_factor)


@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    database=None,
    derandomize=True,
)
@given(histories())
@example(History([], 1, 3))
@example(History([], 1, 3, dies=12))
@example(History(["", "", "", "", "", "", *["lost"] * 30], 2, 2))
@example(History([], 3, 2, interrupted=7, after=True))
def test_nothing_is_left_or_it_ends_itself(
    server: tuple[EC2, AwsClients], history: History
) -> None:
    live(server[0], history, server[1])


def calls_of_a_whole_life(server: tuple[EC2, AwsClients]) -> range:
    """Numbers of the calls that acquiring and giving back take where all goes well."""
    live(server[0], History([], 1, 2), server[1])
    return range(1, [call.action for call in server[0].calls].index("DeleteSecurityGroup") + 3)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("what", ["interrupted", "dies"])
def test_an_interrupt_and_a_death_at_each_call(
    server: tuple[EC2, AwsClients], what: str, after: bool
) -> None:
    """Ctrl-C, and kill -9, at every call of a whole life: before it is made, and once it was carried out."""
    server[0].forget()  # moto keeps all that was ever launched, and is slower for it
    for number in calls_of_a_whole_life(server):
        live(server[0], History([], 1, 2, after=after, **{what: number}), server[1])


def test_the_keys_of_pools_that_are_gone_are_gone(
    server: tuple[EC2, AwsClients], tmp_path: Path
) -> None:
    from skymagic.providers.aws import boot

    boot.make_keys("gone-1")
    boot.remove_keys("gone-1")
    boot.remove_keys("../gone")
    assert not boot.keys_folder("gone-1").exists()
