"""Progress bars of libraries in JupyterLab: a broadcast cell shows what a plain cell shows, in its order, and no bar leaves copies."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from tests.lab.browser import Browser, opened

pytest.importorskip("torch")
pytestmark = pytest.mark.needs("chromium")

LOOP = "import time\nfor epoch in range(2):\n    for _ in {bar}:\n        time.sleep(0.02)\n    print('loss', epoch)"
NESTED = """\
import time
from tqdm import tqdm
for epoch in tqdm(range(2), desc="outer"):
    for _ in tqdm(range(10), desc="inner", leave=False):
        time.sleep(0.02)
print("after")"""
RICH = """\
import time
from rich.progress import Progress
with Progress() as bars:
    outer, inner = bars.add_task("outer", total=2), bars.add_task("inner", total=10)
    for epoch in range(2):
        bars.reset(inner)
        for _ in range(10):
            time.sleep(0.02)
            bars.advance(inner)
        bars.advance(outer)
print("after")"""
LIGHTNING = """\
import warnings
import lightning, torch
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar
warnings.simplefilter("ignore")
class Line(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.line = torch.nn.Linear(4, 1)
    def training_step(self, batch):
        return self.line(batch[0]).square().mean()
    def validation_step(self, batch):
        self.log("val", self.line(batch[0]).square().mean(), sync_dist=True)
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)
data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(64, 4)), 4)
options = dict(logger=False, enable_checkpointing=False, enable_model_summary=False, accelerator="cpu")
lightning.Trainer(max_epochs=2, callbacks=[{bar}()], **options).fit(Line(), data, data)
print("after")"""
KERAS = """\
import os
os.environ.setdefault("KERAS_BACKEND", "torch")
import keras, numpy
model = keras.Sequential([keras.layers.Dense(1)])
model.compile("sgd", "mse")
x = numpy.ones((320, 4))
model.fit(x, x[:, :1], epochs=2, batch_size=16, validation_split=0.2)
print("after")"""
TRANSFORMERS = """\
import tempfile, torch, transformers
class Line(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.line = torch.nn.Linear(4, 1)
    def forward(self, x=None, labels=None):
        found = self.line(x)
        return {"loss": (found - labels).square().mean(), "logits": found}
data = [{"x": torch.ones(4), "labels": torch.ones(1)} for _ in range(64)]
arguments = transformers.TrainingArguments(
    tempfile.mkdtemp(), num_train_epochs=2, per_device_train_batch_size=4, eval_strategy="epoch", logging_strategy="epoch",
    report_to=[], use_cpu=True, save_strategy="no", dataloader_pin_memory=False)
transformers.Trainer(Line(), arguments, train_dataset=data, eval_dataset=data).train()
print("after")"""
EACH_EPOCH = [r"e0: +100%", "loss 0", r"e1: +100%", "loss 1"]
BARS = {
    "tqdm": (
        "from tqdm import tqdm\n" + LOOP.format(bar="tqdm(range(10), desc=f'e{epoch}')"),
        EACH_EPOCH,
    ),
    "tqdm.auto": (
        "from tqdm.auto import tqdm\n" + LOOP.format(bar="tqdm(range(10), desc=f'e{epoch}')"),
        EACH_EPOCH,
    ),
    "tqdm.notebook": (
        "from tqdm.notebook import tqdm\n" + LOOP.format(bar="tqdm(range(10), desc=f'e{epoch}')"),
        EACH_EPOCH,
    ),
    "tqdm nested": (NESTED, [r"outer: +100%", "after"]),
    "rich": (RICH, [r"outer ━+ 100%", r"inner ━+ 100%", "after"]),
    "lightning tqdm": (LIGHTNING.replace("{bar}", "TQDMProgressBar"), [r"Epoch 1: +100%", "after"]),
    "lightning rich": (LIGHTNING.replace("{bar}", "RichProgressBar"), [r"Epoch 1/1 +━+", "after"]),
    "keras": (
        KERAS,
        ["Epoch 1/2", r"16/16 ━+ .*val_loss", "Epoch 2/2", r"16/16 ━+ .*val_loss", "after"],
    ),
    "transformers": (
        TRANSFORMERS,
        [r"\[\d+/\d+ .*Epoch 2/2\]", r"Training Loss\s+Validation Loss", "after"],
    ),
}
"""A cell by library, and what its bars and lines end as, in their order."""
PASSING = r"e\d:|outer|inner|Epoch \d+/?\d*:? +[\d━]|Validation [^L]|Sanity|\x1b|\[A"
"""A line of a bar, or of one whose controls a terminal would have obeyed."""
CELLS = [
    "%load_ext skymagic\n%config SkyMagic.view_after = 0.3\n%sky_pool --ranks 2 --plugin torch"
]
CELLS += [f"%%sky_broadcast\n{cell}" for cell, _ in BARS.values()]
# the other libraries take 3 s to import in the kernel as well
CELLS += [cell for library, (cell, _) in BARS.items() if library.startswith(("tqdm", "rich"))]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with opened(tmp_path_factory.mktemp("bars"), CELLS) as one:
        one.run(0)
        yield one


@pytest.mark.parametrize("library", BARS)
def test_a_librarys_bars_end_as_in_a_plain_cell(browser: Browser, library: str) -> None:
    package = library.partition(" ")[0].partition(".")[0]
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    cell, ends = BARS[library]
    broadcast = (
        browser.run(CELLS.index(f"%%sky_broadcast\n{cell}")).inner_text().replace("\u2007", " ")
    )
    assert re.search(r"[\s\S]*?".join(ends), broadcast), f"{ends} in this order:\n{broadcast}"
    if cell in CELLS:
        plain = browser.run(CELLS.index(cell)).inner_text().replace("\u2007", " ")
        without = [
            re.sub(r" \+?100%", "", end) for end in ends
        ]  # rich's last state does not reach a plain cell
        assert re.search(r"[\s\S]*?".join(without), plain), f"{without} in this order:\n{plain}"
    bars = [line for line in broadcast.splitlines() if re.search(PASSING, line)]
    assert all(any(re.search(end, line) for end in ends) for line in bars), broadcast
    assert len(bars) == len(set(bars)), "none is there twice"
    if library.startswith("lightning"):
        assert broadcast.index("`Trainer.fit` stopped") < broadcast.index("after"), broadcast
