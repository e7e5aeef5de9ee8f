"""Each line of several ranks has its rank's label, however many write the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from skymagic.display.labels import Labels
from tests.lab.notebook import opened


@pytest.mark.parametrize("ranks", [2, 8, 64])
def test_equal_lines_are_shown_by_rank(ranks: int) -> None:
    written: list[str] = []
    labels = Labels(range(ranks), lambda name, text: written.append(text))
    for rank in range(ranks):
        labels.text(rank, "stdout", "ready\n" if rank else "ready\nhead\n")
    labels.text(1, "stdout", "open")
    labels.finish()
    width = len(str(ranks - 1))
    expected = [(rank, "ready") for rank in range(ranks)]
    expected[1:1] = [(0, "head")]
    assert "".join(written) == "".join(
        f"[{rank:>{width}}] {line}\n" for rank, line in [*expected, (1, "open")]
    )


def test_a_cell_of_many_ranks(tmp_path: Path) -> None:
    with opened(tmp_path, "%sky_pool --ranks 8") as notebook:
        lines = notebook.run(
            "%%sky_broadcast --only all\nimport os\nrank = int(os.environ['RANK'])\nprint('step 1')\n"
            "if rank == 5:\n    print('loss is nan')\nprint('step 2')"
        ).lines
        for rank in range(8):
            label = f"[{rank}] "
            assert [line.removeprefix(label) for line in lines if line.startswith(label)] == [
                "step 1",
                *(["loss is nan"] if rank == 5 else []),
                "step 2",
            ]
        assert len(lines) == 17
