"""What was made in the notebook as process 0 of 1 does not travel: on the ranks it would train as if it were alone."""

from __future__ import annotations

import re
from importlib.util import find_spec

import pytest

from tests.lab.golden import Golden
from tests.lab.notebook import Notebook, seen
from tests.lab.pools import borrowed

notebook = borrowed(
    "--ranks 2", "import torch\nfrom torch.utils.data import DataLoader, DistributedSampler"
)

SAMPLER = "DistributedSampler(range(8), num_replicas=1, rank=0)"
OBJECTS = {
    "transformers": [
        "import transformers\nx = transformers.TrainingArguments('out', use_cpu=True, report_to='none')",
        "import transformers\nx = transformers.Seq2SeqTrainingArguments('out', use_cpu=True, report_to='none')",
        "import transformers\nx = transformers.Trainer(torch.nn.Linear(1, 1), "
        "transformers.TrainingArguments('out', use_cpu=True, report_to='none'))",
    ],
    "accelerate": [
        "from accelerate import Accelerator\nx = Accelerator(cpu=True)",
        "from accelerate import PartialState\nx = PartialState(cpu=True)",
        "from accelerate import Accelerator\nfirst = torch.nn.Linear(1, 1)\n"
        "x = Accelerator(cpu=True).prepare(torch.optim.SGD(first.parameters(), 0.1))",
        "from accelerate import Accelerator\nx = Accelerator(cpu=True).prepare(DataLoader(range(8)))",
    ],
    "lightning": [
        "import lightning as L\nx = L.Trainer(accelerator='cpu', devices=1, logger=False)",
        "import lightning as L\nx = L.Fabric(accelerator='cpu', devices=1)",
    ],
    "datasets": [
        "import datasets\nfrom datasets.distributed import split_dataset_by_node\n"
        "x = split_dataset_by_node(datasets.Dataset.from_dict({'a': [1, 2]}).to_iterable_dataset(), 0, 2)",
    ],
    "torch": [
        f"x = {SAMPLER}",
        f"class Mine(DistributedSampler): pass\nx = {SAMPLER.replace('DistributedSampler', 'Mine')}",
        "class Own(torch.utils.data.Sampler):\n    def __init__(self): self.rank, self.world_size = 0, 1\nx = Own()",
        "class Part(torch.utils.data.IterableDataset):\n"
        "    def __init__(self): self._rank, self._world_size = 0, 1\n"
        "    def __iter__(self): return iter(range(self._rank, 9, self._world_size))\nx = Part()",
    ],
}
CASES = [(package, cell) for package, cells in OBJECTS.items() for cell in cells]


@pytest.mark.parametrize(("package", "cell"), CASES)
def test_objects_that_know_the_world_are_refused(
    notebook: Notebook, package: str, cell: str
) -> None:
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    notebook.run(cell)
    error = notebook.fail("%%sky_broadcast\nprint(x)")
    assert error.ename == "CaptureError"
    [line] = [line for line in error.text.splitlines() if line.strip().startswith("x (")]
    assert re.search(r": .*process 0 of 1; create it\b", line)


NESTED = {
    "x['train'][0]": "x = {'train': [sampler]}",
    "x.sampler": "class Box: pass\nx = Box(); x.sampler = sampler",
    "x.loader": "class Box: pass\nx = Box(); x.loader = DataLoader(range(8), sampler=sampler)",
    "x.<closure>.sampler": (
        "def make(sampler):\n    def x(): return list(sampler)\n    return x\nx = make(sampler)"
    ),
}


@pytest.mark.parametrize("path", NESTED)
def test_they_are_named_where_they_are_nested(
    golden: Golden, notebook: Notebook, path: str
) -> None:
    notebook.run(f"sampler = {SAMPLER}\n{NESTED[path]}")
    error = notebook.fail("%%sky_broadcast\nprint(x)")
    assert path in error.text
    golden.line(error.text, "x (")


def test_unpicklable_global_of_a_function_is_refused(notebook: Notebook) -> None:
    notebook.run(f"sampler = {SAMPLER}\ndef share(): return list(sampler)")
    error = notebook.fail("%%sky_broadcast\nshare()")
    assert "sampler (torch.utils.data.distributed.DistributedSampler, used by share)" in error.text


def test_the_ranks_own_are_theirs(notebook: Notebook) -> None:
    notebook.run(f"sampler = {SAMPLER}")
    cell = "import os\nrank = int(os.environ['RANK'])"
    notebook.run(
        f"%%sky_broadcast\n{cell}\nfrom torch.utils.data import DistributedSampler\n"
        "sampler = DistributedSampler(range(4), num_replicas=2, rank=rank, shuffle=False)"
    )
    assert seen(notebook, "list(sampler)") == [[0, 2], [1, 3]]
    notebook.run("%%sky_broadcast -o back\nsampler")
    assert notebook.value("[list(each) for each in back]") == [[0, 2], [1, 3]]


def test_other_samplers_and_datasets_travel(notebook: Notebook) -> None:
    notebook.run(
        "class Ranked(torch.utils.data.Dataset):\n    rank = 5\n    def __init__(self): self.rank = 3\n"
        "random = torch.utils.data.RandomSampler(range(4))\nranked = Ranked()"
    )
    assert seen(notebook, "len(list(random)), ranked.rank") == [(4, 3)] * 2
