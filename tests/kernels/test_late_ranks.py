"""Values of plugins for ranks that start later than the one that has put them."""

from __future__ import annotations

import contextlib
import secrets
from dataclasses import replace
from pathlib import Path

import pytest

from skymagic.wire import agent as wire
from skymagic.wire.order import RunCell, packed_order
from skymagic.wire.output import OutputComplete, OutputText
from tests.contracts import links
from tests.contracts.test_agent_output import REQUEST, Reader, pool_of_one

PREFIXES = {
    "no prefix": "contextlib.nullcontext()",
    "a subgroup": "rendezvous.key_prefix('run 3')",
    "prefix with slashes": "rendezvous.key_prefix('run/3/part')",
}
GETS = """import contextlib
from skymagic.runtime import rendezvous
with {prefix}:
    for name in ("name", "name/2"):
        try:
            print(rendezvous.get(name, 0.2))
        except TimeoutError:
            print("nothing")
"""
KEYS = {"no prefix": "", "a subgroup": "run 3/", "prefix with slashes": "run/3/part/"}


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize(("generation", "expected"), [(1, ["a", "b"]), (2, ["nothing"] * 2)])
def test_late_rank_gets_values_of_its_generation(
    tmp_path: Path, prefix: str, generation: int, expected: list[str]
) -> None:
    with links.to_agent(tmp_path) as make, contextlib.closing(make()) as made:
        spec, rank = pool_of_one(f"test-{secrets.token_hex(4)}")
        reader = Reader(made)
        reader.send(
            spec,
            wire.RendezvousKey(f"{KEYS[prefix]}name/1", "a"),
            wire.RendezvousKey(f"{KEYS[prefix]}name/2/1", "b"),
            wire.Spawn((replace(rank, generation=generation),)),
        )
        reader.until(wire.RankReady)
        order = RunCell(
            ranks=(0,), run=1, visible_ranks=(0,), screen_limit=1 << 30, execution_count=1
        )
        cell = GETS.format(prefix=PREFIXES[prefix])
        reader.send(wire.Request((0,), REQUEST, 1, packed_order(order), cell))
        shown = ""
        while not isinstance(output := reader.output(), OutputComplete):
            assert isinstance(output, OutputText), output
            shown += output.text
        assert shown.split() == expected
        reader.send(wire.Shutdown())
