"""JupyterLab, or Notebook 7, in a browser: a real server, a real Chromium, one notebook that a person would see."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nbformat
from playwright.sync_api import Error, Locator, Page, expect, sync_playwright

from tests.lab.notebook import ROOT, own_folders

DEADLINE = 60.0
"""Seconds that anything may take before it counts as hanging."""
expect.set_options(timeout=DEADLINE * 1000)  # five seconds, its own, are little on a busy machine
SHOTS = "SKYMAGIC_SHOTS"
"""A variable of the environment: the folder for pictures; without it none are taken."""
SERVER = (
    "--no-browser", "--allow-root", "--expose-app-in-browser", "--ServerApp.ip=127.0.0.1", "--ServerApp.port=0",
    "--ServerApp.terminals_enabled=False", "--LabApp.news_url=",
    "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
    "--ServerApp.jpserver_extensions={'jupyter_server_nbmodel': False}",
)  # fmt: skip
PAGES = {"jupyterlab": "doc/tree", "notebook": "notebooks"}
"""By the package of a front end: below which path it shows a notebook."""
CHROMIUM = (
    "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking",
    "--disable-component-update", "--no-first-run",
)  # fmt: skip
NO_NEWS = '{"fetchNews": "false", "checkForUpdates": false, "doNotDisturbMode": true}'
"""JupyterLab's settings: nothing is fetched, and nothing pops up over the cells."""
NO_EXTENSIONS = '{"disabledExtensions": {"@datalayer/jupyter-server-nbmodel": true}}'
"""Of those that are installed: with this one the server executes the cells, see tests/docs/test_same_text.py."""
IDLE = """() => {
    const session = window.jupyterapp?.shell.currentWidget?.sessionContext;
    const kernel = session?.session?.kernel;
    return Boolean(session?.isReady && kernel?.connectionStatus === 'connected' && kernel?.status === 'idle');
}"""
RUN = """(index) => {
    const panel = window.jupyterapp.shell.currentWidget;
    panel.content.activeCellIndex = index;
    window.jupyterapp.commands.execute('notebook:run-cell');
}"""
COUNTED = "(index) => window.jupyterapp.shell.currentWidget.content.widgets[index].model.executionCount !== null"
RESTART = "async () => { await window.jupyterapp.shell.currentWidget.sessionContext.session.kernel.restart(); }"
SAVE = "async () => { await window.jupyterapp.shell.currentWidget.context.save(); }"


class Browser:
    """A notebook open in JupyterLab, or in Notebook 7.

    Args:
        page: the browser's.
        url: where the front end shows notebooks.
        token: of the server.
        path: the notebook's file.
    """

    def __init__(self, page: Page, url: str, token: str, path: Path) -> None:
        self.page = page
        self.path = path
        self.errors: list[str] = []
        """What the browser's console says is wrong."""
        self._address = f"{url}/{path.name}?reset&token={token}"
        page.set_default_timeout(DEADLINE * 1000)
        page.on(
            "console", lambda line: self.errors.append(line.text) if line.type == "error" else None
        )

    def open(self) -> None:
        """Open the notebook, or open it again as a person does who comes back: what is shown is what was saved."""
        self.page.goto(self._address, wait_until="domcontentloaded")
        self.page.wait_for_selector(".jp-Notebook .jp-CodeCell")
        try:
            self.page.wait_for_function(IDLE)
        except Error:
            self.shot("not-idle")
            raise

    def start(self, index: int) -> None:
        """Run a cell, and do not wait for it."""
        self.page.evaluate(RUN, index)

    def run(self, index: int) -> Locator:
        """Run a cell to its end; its outputs. What comes while another cell fails, a kernel does not run."""
        self.page.wait_for_function(IDLE)
        self.start(index)
        self.page.wait_for_function(COUNTED, arg=index)
        self.page.wait_for_function(IDLE)
        return self.outputs(index)

    def outputs(self, index: int) -> Locator:
        """Where a cell's outputs are."""
        return (
            self.page.locator(".jp-Notebook .jp-CodeCell").nth(index).locator(".jp-Cell-outputArea")
        )

    def look_into(self, index: int, words: str) -> Locator:
        """Run a cell that has printed "begun" when it blocks, and press the button that tells where its ranks are; its outputs.

        Args:
            words: what is told.
        """
        self.start(index)
        shown = self.outputs(index)
        expect(shown.get_by_role("button", name="stop")).to_be_visible(timeout=DEADLINE * 1000)
        expect(shown).to_contain_text("begun")
        shown.get_by_role("button", name="where is it?").click()
        expect(shown).to_contain_text(words)
        return shown

    def interrupt(self) -> None:
        """Press the stop button of the notebook's toolbar."""
        self.page.locator(".jp-Toolbar-item[data-jp-item-name=interrupt]").first.click()

    def restart(self) -> None:
        """Restart the kernel, and wait until it answers."""
        self.page.evaluate(RESTART)
        self.page.wait_for_function(IDLE)

    def save(self) -> dict[str, Any]:
        """Save the notebook; what the file holds then."""
        self.page.evaluate(SAVE)
        saved: dict[str, Any] = json.loads(self.path.read_text())
        return saved

    def saved(self, index: int) -> list[str]:
        """The kinds of outputs that the file has of a cell, once it is saved."""
        return [output["output_type"] for output in self.save()["cells"][index]["outputs"]]

    def shot(self, name: str) -> None:
        """Take a picture, where pictures are wanted."""
        if folder := os.environ.get(SHOTS):
            self.page.screenshot(path=str(Path(folder) / f"{name}.png"))


def chromium() -> str | None:
    """Chromium's path here."""
    return shutil.which("chromium") or shutil.which("chromium-browser")


@contextmanager
def opened(folder: Path, cells: Sequence[str], front: str = "jupyterlab") -> Iterator[Browser]:
    """A front end with a notebook of these cells, none of them run; server, kernels and browser end with it."""
    path = folder / "story.ipynb"
    kernel = {
        "kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}
    }  # else it is asked for
    nbformat.write(
        nbformat.v4.new_notebook(
            cells=list(map(nbformat.v4.new_code_cell, cells)), metadata=kernel
        ),
        path,
    )
    with _server(folder, front) as (url, token), sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=list(CHROMIUM))
        try:
            shown = Browser(
                browser.new_page(viewport={"width": 1100, "height": 900}),
                url + PAGES[front],
                token,
                path,
            )
            shown.open()
            yield shown
        finally:
            browser.close()


@contextmanager
def _server(folder: Path, front: str) -> Iterator[tuple[str, str]]:
    """A front end's server on a port of its own choice: its address, with a slash at its end, and token."""
    runtime = folder / ".jupyter-runtime"
    settings = folder / ".jupyter" / "lab" / "user-settings" / "@jupyterlab" / "apputils-extension"
    settings.mkdir(parents=True)
    (settings / "notification.jupyterlab-settings").write_text(NO_NEWS)
    (folder / ".jupyter" / "labconfig").mkdir()
    (folder / ".jupyter" / "labconfig" / "page_config.json").write_text(NO_EXTENSIONS)
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    programs = folder / ".programs"
    programs.mkdir()
    # with Node each page asks yarn for its settings, in 0.7 s of processor time; they are for building JupyterLab
    (programs / "node").symlink_to(shutil.which("false") or "/bin/false")
    env = {
        **os.environ, **own_folders(folder), "PYTHONPATH": path, "JUPYTER_RUNTIME_DIR": str(runtime),
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "JUPYTER_CONFIG_DIR": str(folder / ".jupyter"), "JUPYTER_DATA_DIR": str(folder / ".jupyter-data"),
        "PYTHONFAULTHANDLER": "1",
    }  # fmt: skip
    command = [sys.executable, "-m", front, *SERVER, f"--ServerApp.root_dir={folder}"]
    with open(folder / "server.log", "wb") as log:
        server = subprocess.Popen(command, env=env, cwd=folder, stdout=log, stderr=log)
        try:
            yield _address(server, runtime, folder / "server.log")
        finally:
            server.terminate()  # upon which it ends its kernels, and these their pools
            try:
                server.wait(DEADLINE)
            except subprocess.TimeoutExpired:
                server.send_signal(signal.SIGABRT)  # it tells where it is
                server.wait()
                said = (folder / "server.log").read_text()
                # when all is done, Python may wait for a thread of anyio's that Jupyter has not stopped (jupyterlab/jupyterlab#10442)
                ended = "in _shutdown\n" in said.rpartition("Current thread")[2]
                assert ended, f"the server did not end:\n{said}"


def _address(server: subprocess.Popen[bytes], runtime: Path, log: Path) -> tuple[str, str]:
    """What the server writes down when it listens."""
    written = runtime / f"jpserver-{server.pid}.json"
    deadline = time.monotonic() + DEADLINE
    while time.monotonic() < deadline and server.poll() is None:
        if written.exists() and (text := written.read_text()).endswith("}"):
            info = json.loads(text)
            return str(info["url"]), str(info["token"])
        time.sleep(0.05)  # its file appears; there is no event to wait for
    raise RuntimeError(f"the server did not start:\n{log.read_text()}")
