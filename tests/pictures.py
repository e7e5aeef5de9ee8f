"""``make pictures``: the docs' pictures and the README's moving one, of a real training in JupyterLab."""

from __future__ import annotations

import html
import io
import re
import sys
import tempfile
import time
from pathlib import Path

from PIL import Image
from playwright.sync_api import Error, FloatRect, expect, sync_playwright

from tests.lab import terminal
from tests.lab.browser import CHROMIUM, COUNTED, IDLE, Browser, chromium, opened

DEFINES = """\
import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from tqdm import tqdm

import skymagic as sky

class CNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 16, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3), nn.ReLU(), nn.MaxPool2d(2))
        self.classes = nn.Linear(32 * 5 * 5, 10)

    def forward(self, images):
        return self.classes(self.features(images).flatten(1))

images, labels = load_digits(return_X_y=True)
images = F.interpolate(torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16, size=28)
digits = TensorDataset(images, torch.tensor(labels))"""
TRAINING = """\
%%sky_broadcast -o results
model = DDP(CNN())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
sampler = DistributedSampler(digits)
for epoch in range(4):
    sampler.set_epoch(epoch)
    for images, labels in tqdm(DataLoader(digits, batch_size=8, sampler=sampler), desc=f"epoch {epoch}"):
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        sky.report(loss=loss.item())
    print(f"epoch {epoch}: loss {loss.item():.3f}")

{"rank": dist.get_rank(), "loss": round(loss.item(), 3)};"""
LIGHTNING = """\
%%sky_broadcast
import lightning, logging, warnings
from lightning.pytorch.callbacks import TQDMProgressBar
logging.getLogger("lightning.pytorch").setLevel("ERROR")
warnings.simplefilter("ignore")

class Digits(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = CNN()

    def training_step(self, batch):
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch):
        correct = self.net(batch[0]).argmax(1) == batch[1]
        self.log("accuracy", correct.float().mean(), prog_bar=True, sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

trainer = lightning.Trainer(max_epochs=3, logger=False, enable_checkpointing=False, enable_model_summary=False, callbacks=[TQDMProgressBar()])
trainer.fit(Digits(), DataLoader(digits, batch_size=8), DataLoader(digits, batch_size=8))"""
STEPS = """\
for epoch in range(1000):
    for images, labels in DataLoader(digits, batch_size=8, sampler=sampler):
        {slow}loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()"""
CELLS = {
    "start": "%load_ext skymagic\n%config SkyMagic.view_after = 0.3\n%config SkyMagic.stall_after = 4.0\npool = %sky_pool --ranks 4 --plugin torch",
    "pool": "pool",
    "defines": DEFINES,
    # else what torch imports for a first optimizer is most of the film
    "imports": "%%sky_broadcast\ntorch.optim.SGD(DDP(nn.Linear(1, 1)).parameters(), lr=0.1);",
    "training": TRAINING,
    "results": "results",
    "curve": "pool.metrics.loss.unstack().rolling(10).mean().plot(figsize=(5, 2.2), ylabel='loss');",
    "lightning": LIGHTNING,
    "straggler": "%%sky_broadcast\nimport time\n"
    + STEPS.format(slow="time.sleep(0.2 if dist.get_rank() == 2 else 0)\n        "),
    "failed": "%%sky_broadcast\nfor images, labels in DataLoader(digits, batch_size=64, sampler=sampler):\n"
    "    if dist.get_rank() == 2:\n        raise ValueError(f'bad batch: {len(images)} images')\n    loss = F.cross_entropy(model(images), labels)\n    loss.backward()",
    "buttons": "%%sky_broadcast\ndef load_batch():\n    time.sleep(600)\nprint('begun')\nload_batch()",
    "stopped": "%%sky_broadcast\nfrom tqdm import trange\nfor step in trange(10_000, desc='train'):\n"
    "    images, labels = next(iter(DataLoader(digits, batch_size=8, sampler=sampler)))\n"
    "    F.cross_entropy(model(images), labels).backward()",
    "ranks": "%%sky_broadcast -a\nwhile dist.get_rank() == 1:\n    pass\ndist.barrier()",
}
INDEX = {name: number for number, name in enumerate(CELLS)}
IN_NOTEBOOK_7 = (
    CELLS["start"].replace("--ranks 4", "--ranks 2"),
    "%%sky_broadcast\nimport time\nimport skymagic as sky\nfor step in range(200):\n    time.sleep(0.1)\n"
    "    sky.report(step=step, total=200, loss=1 / (step + 1))\n    if step % 20 == 0:\n        print('step', step)",
)
IN_TERMINAL = (
    "import time, skymagic as sky\nfor epoch in range(20):\n    print('epoch', epoch)\n    for step in range(5):\n        time.sleep(0.1)\n"
    "        sky.report(step=5 * epoch + step, total=100, loss=1 / (epoch + 1))"
)
SCREEN = """<body style="margin: 0"><pre id="screen" style="display: inline-block; margin: 0; padding: 14px 18px; border-radius: 6px;
background: #1e1e1e; color: #e4e4e4; font: 14px/1.35 'Liberation Mono', monospace">{}</pre></body>"""
BARE = ".jp-cell-toolbar, .jp-Collapser { display: none !important; }"
"""A style for pictures: without what JupyterLab lays over the cell that is chosen."""
FRAMES, LAST_MS, COLOURS = 45, 4000, 48
"""Of the moving picture: how many at most, for how long the last one stays, and how many colours."""


def picture(browser: Browser, folder: Path, name: str) -> None:
    """Take a picture of a cell."""
    (folder / f"{name}.png").write_bytes(shot(browser, name))


def shot(browser: Browser, name: str) -> bytes:
    """A cell as it is now, as PNG."""
    cell = browser.page.locator(".jp-Notebook .jp-CodeCell").nth(INDEX[name])
    return cell.screenshot(animations="disabled", style=BARE)


def film(browser: Browser, folder: Path, name: str) -> None:
    """Run a cell; keep what it shows from start to end as one moving picture."""
    frames: list[tuple[float, bytes]] = []
    browser.start(INDEX[name])
    while not (browser.page.evaluate(COUNTED, INDEX[name]) and browser.page.evaluate(IDLE)):
        try:
            frames.append((time.monotonic(), shot(browser, name)))
        except Error:  # JupyterLab replaced the cell's output meanwhile
            continue
    frames.append((time.monotonic(), shot(browser, name)))
    animate(frames, folder / f"{name}.gif")


def animate(frames: list[tuple[float, bytes]], file: Path) -> None:
    """Write frames as a GIF: as many as there is room for, evenly, each shown for as long as it was seen."""
    every = max(1, len(frames) // FRAMES)
    kept = [*frames[:-1:every], frames[-1]]
    pictures = [Image.open(io.BytesIO(data)).convert("RGB") for _, data in kept]
    size = max(one.width for one in pictures), max(one.height for one in pictures)
    palette = pictures[-1].quantize(COLOURS)
    drawn = []
    for one in pictures:
        whole = Image.new("RGB", size, "white")
        whole.paste(one)
        drawn.append(whole.quantize(palette=palette, dither=Image.Dither.NONE))
    shown = [
        round(1000 * (after - before))
        for (before, _), (after, _) in zip(kept, kept[1:], strict=False)
    ]
    drawn[0].save(
        file,
        save_all=True,
        append_images=drawn[1:],
        duration=[*shown, LAST_MS],
        loop=0,
        optimize=True,
    )


def take(browser: Browser, folder: Path) -> None:
    """All pictures, in the order of the cells."""
    for name in ("start", "pool", "defines", "imports"):
        browser.run(INDEX[name])
    picture(browser, folder, "pool")
    film(browser, folder, "training")
    for name in ("results", "curve"):
        browser.run(INDEX[name])
        picture(browser, folder, name)
    seen = {
        "lightning": re.compile(r"Validation.*\d+/|Epoch 1:"),
        "straggler": re.compile("rank 2 is last in every collective"),
    }
    for name, words in seen.items():
        browser.start(INDEX[name])
        expect(browser.outputs(INDEX[name])).to_contain_text(words)
        picture(browser, folder, name)
        if name == "straggler":
            browser.interrupt()
        browser.page.wait_for_function(IDLE)
    browser.run(INDEX["failed"])
    picture(browser, folder, "failed")
    shown = browser.look_into(INDEX["buttons"], "ranks 0–3 in load_batch, line 3")
    picture(browser, folder, "buttons")
    shown.get_by_role("button", name="stop").click()
    browser.page.wait_for_function(IDLE)
    browser.start(INDEX["stopped"])
    expect(browser.outputs(INDEX["stopped"]).locator("progress")).to_be_visible()
    browser.interrupt()
    expect(browser.outputs(INDEX["stopped"])).to_contain_text("interrupted on ranks 0–3")
    picture(browser, folder, "stopped")
    browser.run(INDEX["ranks"]).get_by_role("button", name="ranks").click()
    expect(
        browser.outputs(INDEX["ranks"]).get_by_title(
            re.compile(r"rank 1 on \S+: running; CPU [1-9]\d*%")
        )
    ).to_be_visible()
    picture(browser, folder, "ranks")


def take_in_notebook_7(folder: Path) -> None:
    """A running cell with its buttons in Notebook 7."""
    with (
        tempfile.TemporaryDirectory(prefix="pictures-") as place,
        opened(Path(place), IN_NOTEBOOK_7, "notebook") as browser,
    ):
        browser.run(0)
        browser.start(1)
        shown = browser.outputs(1)
        expect(shown.get_by_role("button", name="stop")).to_be_visible()
        expect(shown).to_contain_text("step 40")
        clip: FloatRect = {"x": 0, "y": 0, "width": 1100, "height": 580}
        browser.page.screenshot(
            path=str(folder / "notebook-7.png"), animations="disabled", clip=clip, style=BARE
        )
        browser.interrupt()
        expect(shown).to_contain_text("interrupted")


def take_in_terminal(folder: Path) -> None:
    """A running cell in IPython: the rows of the terminal, drawn by the browser."""
    with (
        tempfile.TemporaryDirectory(prefix="pictures-") as place,
        terminal.opened(Path(place)) as shell,
    ):
        (Path(place) / "train.py").write_text(IN_TERMINAL)
        begin = len(shell.received)
        shell.run("%load_ext skymagic")
        shell.run("%sky_pool --ranks 2")
        shell.run('source = open("train.py").read()')
        shell.type('get_ipython().run_cell_magic("sky_broadcast", "", source)')
        shell.read("epoch 4")
        shell.read(r"loss \S+")
        shown = [row for row in terminal.rows(shell.received[begin:]) if row]
        shell.read(terminal.PROMPT)
        shell.run("%sky_down")
    text = "\n".join(["In [1]: %load_ext skymagic", *shown[1:]])
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=list(CHROMIUM))
        page = browser.new_page(device_scale_factor=2)
        page.set_content(SCREEN.format(html.escape(text)))
        page.locator("#screen").screenshot(path=str(folder / "terminal.png"))
        browser.close()


def main(folder: Path) -> None:
    """Take the pictures into this folder."""
    take_in_terminal(folder)
    take_in_notebook_7(folder)
    with (
        tempfile.TemporaryDirectory(prefix="pictures-") as place,
        opened(Path(place), list(CELLS.values())) as browser,
    ):
        take(browser, folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
