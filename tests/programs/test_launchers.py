"""The examples of docs/how-to/shell.md: launchers in a script find the nodes of the pool."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.lab.notebook import ROOT, Notebook, opened

HERE = Path(__file__).parent
EXAMPLES = dict(
    re.findall(
        r"<!-- tested: (?!mingpt)(.*?) -->\n```python\n(.*?)```",
        (ROOT / "docs/how-to/shell.md").read_text(),
        re.DOTALL,
    )
)
"""The page's scripts by their marks; those of SkyPilot's example are run by tests/docs/test_mingpt.py."""
NEEDS = {"accelerate": "accelerate", "trainer": "transformers"}
LAUNCHED = [
    name for name in EXAMPLES if name != ("torchrun" if find_spec("transformers") else "trainer")
]
"""torchrun launches both of these alike: the script that shows more stands for the other, for each launch has torch to import four times."""
pytestmark = pytest.mark.skipif(
    find_spec("torch") is None, reason="torch is not installed: pip install torch"
)


def deepspeed(folder: Path) -> Path:
    """A folder with a stand-in for DeepSpeed's launcher; the one that is installed comes before it, in the pool's own PATH."""
    command = folder / "bin" / "deepspeed"
    command.parent.mkdir()
    command.write_text(f"#!{sys.executable}\n{(HERE / 'deepspeed_stand_in.py').read_text()}")
    command.chmod(0o755)
    return command.parent


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    """In a folder with the scripts that the examples name, on a pool of two nodes."""
    folder = tmp_path_factory.mktemp("launchers")
    for name in ("train", "train_accelerate", "run_trainer"):
        shutil.copy(HERE / f"{name}.py", folder)
    env = {
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "PATH": f"{deepspeed(folder)}:{os.environ['PATH']}",
    }
    with opened(folder, "%sky_pool --nodes 2", env=env) as one:
        yield one


def test_one_line_launches_a_script_of_any_kind() -> None:
    torchrun, trainer = (
        EXAMPLES[name].splitlines()[1].split()[:1] for name in ("torchrun", "trainer")
    )
    assert torchrun == trainer == ["torchrun"]
    assert len(EXAMPLES) == len(LAUNCHED) + 1


@pytest.mark.parametrize("name", LAUNCHED)
def test_an_example_trains_on_all_nodes(notebook: Notebook, name: str) -> None:
    if find_spec(NEEDS.get(name, "torch")) is None:
        pytest.skip(f"{NEEDS[name]} is not installed")
    magic, _, script = EXAMPLES[name].partition("\n")
    shown = notebook.run(f"{magic.partition(' ')[0]} --only all\n{script}")
    ends = {"trainer": "DistributedDataParallel"}.get(name, "2 took part")
    said = [line.partition("] ")[2] for line in shown.lines if re.search(r"rank \d local", line)]
    assert sorted(said) == [f"rank {rank} local 0 of 2: {ends}" for rank in range(2)], shown.text
