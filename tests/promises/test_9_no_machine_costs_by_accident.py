"""Promise 9: the price comes before the launch, limits are kept, and nothing stays rented; on the imitation of EC2 with real sshd's."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.lab import ec2 as cloud
from tests.lab.notebook import Notebook, opened, seen
from tests.lab.sites import Place, machines_of_ec2

pytestmark = pytest.mark.needs("sshd")


@pytest.fixture(scope="module")
def rented(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Place, Notebook]]:
    """A place to rent from, and a notebook of somebody who has credentials for it."""
    folder = tmp_path_factory.mktemp("rented")
    (folder / "notebook").mkdir()
    with (
        machines_of_ec2(folder) as place,
        opened(folder / "notebook", place.before, env=place.env) as notebook,
    ):
        yield place, notebook
        notebook.run("%sky_down --all")


def test_the_price_stands_in_the_plan_and_nothing_is_launched(
    rented: tuple[Place, Notebook],
) -> None:
    place, notebook = rented
    shown = notebook.run(f"%sky_pool paid {place.options} --dry-run")
    assert re.search(r"\$\d+\.\d+", shown.said)
    assert "--idle is none" not in shown.said, "nobody pays for a forgotten pool"
    assert cloud.instances() == []


def test_a_price_above_the_limit_is_refused_before_the_launch(
    rented: tuple[Place, Notebook],
) -> None:
    place, notebook = rented
    failure = notebook.fail(f"%sky_pool paid {place.options} --max-price 0.05")
    assert "$0.05" in failure.text
    assert cloud.instances() == []


def test_no_question_without_an_answerer(rented: tuple[Place, Notebook]) -> None:
    """Without ``-y`` and without somebody who could answer, nothing is rented."""
    place, notebook = rented
    failure = notebook.fail(f"%sky_pool paid {place.options.replace(' -y', '')}")
    assert "-y" in failure.text
    assert cloud.instances() == []


def test_a_pool_runs_shows_its_price_and_leaves_nothing(rented: tuple[Place, Notebook]) -> None:
    place, notebook = rented
    notebook.run(f"%sky_pool paid {place.options}")
    assert len([one for one in cloud.instances() if one.state == "running"]) == 2
    assert seen(notebook, "import os\nint(os.environ['RANK'])") == [0, 1]
    assert re.search(r"\$\d+\.\d+", notebook.run("%sky_status").rich[-1]["text/html"])
    # anybody with these credentials finds it, from any machine
    assert "paid" in notebook.run("%sky_status --provider aws").said
    notebook.run("%sky_down paid")
    assert place.left() == []
