"""The contract of a store on machines of their own: two hosts, and eight behind a link that is slow and loses frames."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest

from tests.contracts.stores import Apart, Remote
from tests.contracts.test_store import (
    lent,
    nodes,
    remote,
    remote_lent,
    test_a_dropped_value_is_freed_and_stays_mapped,
    test_a_value_arrives_equal_and_is_private,
    test_a_value_moves_once_whatever_the_number_of_nodes,
    test_a_value_survives_a_cut_on_its_way,
    test_given_file_is_taken_once,
    test_of_a_changed_value_only_the_change_moves,
    test_received_bytes_are_not_sent_again_after_a_cut,
    test_the_end_leaves_nothing,
    test_value_changed_while_stored_keeps_its_hash,
    test_values_return_from_all_nodes,
)
from tests.lab.machines import machines

__all__ = [
    "lent",
    "nodes",
    "remote",
    "remote_lent",
    "test_a_dropped_value_is_freed_and_stays_mapped",
    "test_a_value_arrives_equal_and_is_private",
    "test_a_value_moves_once_whatever_the_number_of_nodes",
    "test_a_value_survives_a_cut_on_its_way",
    "test_given_file_is_taken_once",
    "test_of_a_changed_value_only_the_change_moves",
    "test_received_bytes_are_not_sent_again_after_a_cut",
    "test_the_end_leaves_nothing",
    "test_value_changed_while_stored_keeps_its_hash",
    "test_values_return_from_all_nodes",
]

pytestmark = pytest.mark.needs("sshd", "namespaces")
PLACES = [
    pytest.param((2, {}), id="two hosts"),
    pytest.param(
        (8, {"rate_mbit": 100.0, "delay_ms": 10.0, "loss": 0.002}), id="eight, slow and lossy"
    ),
]


@pytest.fixture(scope="module", params=PLACES)
def maker(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., Remote]]:
    count, wan = request.param
    with machines(tmp_path_factory.mktemp("apart") / "hosts", count, **wan) as hosts:
        yield partial(Apart, hosts)


@pytest.fixture(scope="module")
def remote_maker(maker: Callable[..., Remote]) -> Callable[..., Remote]:
    return maker
