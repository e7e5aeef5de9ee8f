"""A pool as it is shown: while it starts, when it is ready, and when ranks are gone."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from skymagic.display import panel, text
from skymagic.display.live import NONINTERACTIVE
from skymagic.display.panel import NodeView, PoolView, RankUse, environment_step, pool_html
from skymagic.plan.units import rank_words
from tests.lab.pools import KERNEL, Pools

TAGS = re.compile(r"<[^>]*>")


def words(view: PoolView) -> str:
    """What is left where styles and tooltips are not shown."""
    return " ".join(TAGS.sub(" ", pool_html(view)).split())


def pool(nodes: int, each: int, state: str = "ready", **states: str) -> PoolView:
    """A pool whose ranks are all in one state, but for those that are named (``r3="ended"``)."""
    numbers = [range(node * each, (node + 1) * each) for node in range(nodes)]
    return PoolView(
        "lab",
        ("ssh", f"{nodes} nodes"),
        state,
        tuple(
            NodeView(f"gpu{node}", tuple((rank, states.get(f"r{rank}", state)) for rank in ranks))
            for node, ranks in enumerate(numbers)
        ),
    )


def test_64_ranks_have_a_cell_each() -> None:
    shown = pool_html(pool(8, 8))
    assert all(f'title="rank {rank} on gpu{rank // 8}: ready"' in shown for rank in range(64))
    assert words(pool(2, 2)) == "lab · ssh · 2 nodes · ready gpu0 0 1 gpu1 2 3"


def test_256_ranks_fold_by_node() -> None:
    view = pool(32, 8, r77="ended", r78="reconnecting")
    assert pool_html(view).count("title=") == 32
    assert 'title="gpu9: 8 ranks: 6 ready, 1 ended, 1 reconnecting"' in pool_html(view)
    assert words(view).endswith("gpu9: 1 ended, 1 reconnecting"), "also without colours"
    assert pool_html(pool(256, 1)).count("title=") == 256
    assert len(pool_html(pool(256, 1))) < 100_000
    assert words(pool(4, 64)) == (
        "lab · ssh · 4 nodes · ready gpu0 64 ranks gpu1 64 ranks gpu2 64 ranks gpu3 64 ranks"
    )


def using(nodes: int, each: int, use: RankUse) -> PoolView:
    """A pool whose ranks all use so much."""
    view = pool(nodes, each, "running")
    return replace(
        view,
        nodes=tuple(
            replace(node, use={rank: use for rank, _ in node.ranks}) for node in view.nodes
        ),
    )


ON_GPU = RankUse(1.1, 2e9, 64e9, 0.97, 31e9, 80e9)
ON_CPU = RankUse(1.1, 2e9, 64e9)


def test_resource_use_is_shown_beside_each_rank() -> None:
    assert words(using(1, 2, ON_GPU)).endswith("gpu0 0 97% 31G 1 97% 31G")
    assert words(using(1, 2, ON_CPU)).endswith("gpu0 0 110% 2.0G 1 110% 2.0G")
    assert words(using(1, 2, RankUse())).endswith("gpu0 0 1"), "nothing is known"
    title = 'title="rank 0 on gpu0: running; GPU 97%, 31.0 GB of 80.0 GB; CPU 110%, memory 2.0 GB of 64.0 GB"'
    assert title in pool_html(using(1, 2, ON_GPU))


def test_resource_use_of_many_ranks_is_shown_by_node() -> None:
    assert pool_html(using(8, 8, ON_GPU)).count("97% 31G") == 64
    assert len(pool_html(using(8, 8, ON_GPU))) < 40_000
    folded = using(4, 64, ON_GPU)
    assert words(folded).count("GPU 97%, 1984.0 GB of 5120.0 GB") == 4
    many = using(32, 8, ON_GPU)
    assert words(many).endswith("GPU 97%, 7936.0 GB of 20480.0 GB")
    assert pool_html(many).count("GPU 97%, 248.0 GB of 640.0 GB") == 32
    assert words(using(32, 8, ON_CPU)).endswith("CPU 28160%, 512.0 GB")


def test_problems_are_named_not_only_coloured() -> None:
    assert (
        words(pool(2, 2, "running", r3="ended"))
        == "lab · ssh · 2 nodes · running gpu0 0 1 gpu1 2 3 1 ended"
    )


def test_names_are_text_and_nothing_else() -> None:
    hostile = '"><script>alert(1)</script>'
    shown = pool_html(
        PoolView(hostile, (hostile,), hostile, (NodeView(hostile, ((0, hostile),), hostile),))
    )
    assert "<script" not in shown
    assert '""' not in shown


@pytest.mark.parametrize(("share", "bars"), [(0.25, ["0.250"]), (0.0, ["0.000"]), (None, [])])
def test_known_progress_of_a_step_is_a_bar(share: float | None, bars: list[str]) -> None:
    node = NodeView("gpu0", (), "environment", "Downloading torch (175.0MiB)", share)
    view = PoolView("lab", (), "starting …", (node,))
    assert re.findall(r'<progress value="([^"]*)" max="1"', pool_html(view)) == bars
    assert words(view).endswith("gpu0 environment · Downloading torch (175.0MiB)")


def test_many_nodes_that_start_have_one_bar() -> None:
    nodes = tuple(
        NodeView(f"gpu{n}", (), "environment", "Downloading torch", n % 2 * 0.5) for n in range(32)
    )
    view = PoolView("lab", (), "starting …", nodes)
    assert re.findall(r'<progress value="([^"]*)"', pool_html(view)) == ["0.250"]
    assert words(view).endswith("environment on 32 nodes")


def test_temporary_start_steps_need_a_redrawn_display() -> None:
    said: list[str] = []
    with panel.start_panel(said.append, lambda steps: PoolView("lab", (), ""), drawn=False) as say:
        say("starting 2 ranks …")
        say(panel.passing_step("importing torch"))
        say("ready")
    assert said == ["starting 2 ranks …", "ready"]


def test_a_step_is_a_line_that_knows_its_node() -> None:
    step = environment_step("gpu1", "installing packages", 0.5)
    assert (str(step), step.nodes, step.step) == (
        "gpu1: installing packages",
        ("gpu1",),
        "installing packages",
    )
    assert (step.phase, step.share) == ("environment", 0.5)


def test_the_status_of_many_ranks_folds_by_node() -> None:
    rows = [
        (rank, rank // 64, f"gpu{rank // 64}", 4000 + rank, "ended" if rank == 70 else "ready")
        for rank in range(128)
    ]
    assert text.status(rows[:2]).splitlines()[1].split() == ["0", "0", "gpu0", "4000", "ready"]
    _, first, second, third = (re.split(r"  +", line) for line in text.status(rows).splitlines())
    assert first == ["0–63", "0", "gpu0", "ready"]
    assert second[1:] == ["1", "gpu1", "ready"]
    assert third == ["70", "1", "gpu1", "ended"]


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ([3], "rank 3"),
        ([1, 0], "ranks 0, 1"),
        ([0, 1, 3], "ranks 0, 1, 3"),
        ([*range(31), *range(32, 64)], "ranks 0–30, 32–63"),
    ],
)
def test_many_ranks_are_named_as_ranges(ranks: list[int], words: str) -> None:
    assert rank_words(ranks) == words


# ------------------------------------------------------------------------------------------ in a notebook


def test_a_start_is_one_display_that_ends_as_one_line(shared_pools: Pools) -> None:
    with shared_pools.lent(KERNEL, watched=True) as notebook:
        shown = notebook.run("%sky_pool --ranks 2")
        start, pool = shown.rich
        assert shown.text == ""
        assert re.fullmatch(r"starting 2 ranks on \S+ …\nready in \d+\.\d s", start["text/plain"])
        assert re.fullmatch(
            r"main · local · 2 ranks on \S+ · ready in \d+\.\d s", TAGS.sub("", start["text/html"])
        )
        assert re.fullmatch(
            r"<Pool 'main': 2 ranks on \S+, plugins: none, ready>", pool["text/plain"]
        )
        assert pool["text/html"].count(": ready") == 2
        assert "main" not in TAGS.sub("", pool["text/html"]), "its title stands above already"
        (again,) = notebook.run("pool = _\npool").rich
        assert TAGS.sub("", again["text/html"]).startswith("main · local · 2 ranks on ")
        notebook.run("%sky_down")
        (stopped,) = notebook.run("pool").rich
        assert TAGS.sub("", stopped["text/html"]).endswith("· stopped")
        failed = notebook.finish(
            notebook.start(
                "%sky_pool wrong --ranks 2 --env LD_PRELOAD=/nowhere.so --plugin nothere"
            )
        )
        assert failed.rich == [], "a request that is refused shows nothing of a start"


def test_failed_start_is_shown_in_its_panel(shared_pools: Pools) -> None:
    with shared_pools.lent(KERNEL, watched=True) as notebook:
        notebook.run(
            "import skymagic as sky\nfrom skymagic.providers.local import Local\n"
            "acquire = Local.acquire\ndef refuse(self, survey, job_id, say):\n    raise OSError('no machine')\nLocal.acquire = refuse"
        )
        shown = notebook.finish(notebook.start("%sky_pool --ranks 2"))
        notebook.run("Local.acquire = acquire")
        assert shown.error is not None
        (start,) = shown.rich
        assert TAGS.sub("", start["text/html"]).endswith("· not started")


@pytest.mark.parametrize(("silent", "watched"), [("1", True), ("0", False)])
def test_unattended_start_prints_lines(shared_pools: Pools, silent: str, watched: bool) -> None:
    said = f"import os\nos.environ[{NONINTERACTIVE!r}] = {silent!r}"
    with shared_pools.lent(KERNEL, said, watched=watched) as notebook:
        shown = notebook.run("%sky_pool --ranks 1;")
        assert [line.split()[0] for line in shown.lines] == ["starting", "ready"]
        assert shown.kinds == ["stdout", "execute_result"]
