"""What a rank shows while its notebook is away, in a notebook."""

from __future__ import annotations

import re
from pathlib import Path

from skymagic.kernels.agent.replay_buffer import (
    MAX_DISPLAYS,
)  # fmt: skip
from tests.lab.golden import Golden
from tests.lab.notebook import Notebook
from tests.lab.pools import borrowed

notebook = borrowed("--ranks 2", "pool = %sky_pool --ranks 2")


# ------------------------------------------------------------------------------------------ runs without a notebook


def tell(notebook: Notebook, what: str) -> None:
    """Tell the agent as its daemon does, until it has heard: it answers what comes after."""
    notebook.run(
        f"from skymagic.wire import agent as wire\npool.pool.resources.agents._links[0].send(wire.{what}())"
    )
    notebook.run("%sky_logs --rank 0 -n 1")


def test_a_cell_that_ends_while_the_notebook_is_away(golden: Golden, notebook: Notebook) -> None:
    tell(notebook, "NotebookDetached")
    cell = f"%%sky_broadcast\nfor number in range({MAX_DISPLAYS + 7}):\n    display(number)"
    shown = notebook.run(cell)
    assert [one["text/plain"] for one in shown.rich] == [
        str(number) for number in range(7, MAX_DISPLAYS + 7)
    ]
    golden.line(shown.text, "[7 displays of rank 0 ")
    tell(notebook, "NotebookAttached")
    assert len(notebook.run(cell).rich) == MAX_DISPLAYS + 7


def test_a_message_of_50_mb(golden: Golden, notebook: Notebook) -> None:
    long = "'begin ' + 'x' * 50_000_000 + ' end'"
    failed = notebook.fail(
        f"%%sky_broadcast\nimport os\nif os.environ['RANK'] == '1':\n    raise ValueError({long})"
    )
    assert failed.ename.endswith("ValueError")
    assert len(failed.text) < 1_000_000
    assert len(failed.evalue) < 1_000_000
    assert "begin xxx" in failed.text
    assert "xxx end" in failed.text
    golden(re.findall(r"\[… .* …\]", failed.text)[:1], hide=[r"[\d,]{5,}"])
    notebook.run("agent = pool.pool.resources.agents.started[0].directory")
    log = Path(notebook.value("agent"), "rank-1.log")
    assert log.stat().st_size > 50_000_000
