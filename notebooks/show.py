"""Run a notebook from the command line and print its magic cells and what each cell shows.

python notebooks/show.py NOTEBOOK [--save FILE] [--timeout SECONDS]; exit status 1 when a cell fails. What is saved has nothing of the
machine but its name: no times of cells, no folders of their own making. `make notebooks` saves all of them so.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
TEMPORARY = re.compile(rf"{re.escape(tempfile.gettempdir())}/tmp\w+")


def text_of(output: Any) -> str:
    """What one output looks like in a terminal: streams and text/plain as they are, an error as its traceback."""
    if output["output_type"] == "stream":
        return str(output["text"])
    if output["output_type"] == "error":
        return "\n".join(output["traceback"]) + "\n"
    return str(output["data"].get("text/plain", "")) + "\n"


def tidy(notebook: Any) -> Any:
    """An executed notebook as it is kept: the text of a stream in one piece, without times and the names of folders for a while."""
    notebook["metadata"]["language_info"] = {"name": "python"}
    for cell in notebook["cells"]:
        cell["metadata"].pop("execution", None)
        outputs: list[Any] = []
        for output in cell.get("outputs", ()):
            if output["output_type"] == "stream":
                output["text"] = TEMPORARY.sub("/tmp/folder", output["text"])
                if outputs and outputs[-1].get("name") == output["name"]:
                    outputs[-1]["text"] += output["text"]
                    continue
            outputs.append(output)
        if cell["cell_type"] == "code":
            cell["outputs"] = outputs
    return notebook


def as_printed(text: str) -> str:
    """The text as a terminal would leave it: what a carriage return overwrites is not shown."""
    lines = (line.rstrip("\r").rsplit("\r", 1)[-1] for line in text.split("\n"))
    return "\n".join(lines)


def show(cell: Any) -> None:
    """Print one executed code cell: its source when it is a magic, then its outputs."""
    source = cell["source"]
    text = as_printed("".join(text_of(output) for output in cell["outputs"]))
    if "%" in {line[:1] for line in source.splitlines()}:
        print("\n" + "\n".join(f"    {line}" for line in source.splitlines()) + "\n")
    if text.strip():
        print(text if sys.stdout.isatty() else ANSI.sub("", text), end="", flush=True)


def execute(path: Path, save: Path | None, timeout: int) -> int:
    """Run the notebook in its own folder, printing cell by cell; returns the exit status."""
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook,
        timeout=timeout,
        extra_arguments=[
            "--IPKernelApp.log_level=40"
        ],  # what it says of its sockets is not for a terminal
        resources={"metadata": {"path": str(path.parent)}},
        on_cell_executed=lambda cell, **_: show(cell),
    )
    try:
        client.execute()
    except CellExecutionError:
        return 1  # the cell's traceback is printed with its outputs
    finally:
        if save is not None:
            save.parent.mkdir(parents=True, exist_ok=True)
            nbformat.write(tidy(notebook), save)
    return 0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("notebook", type=Path)
    parser.add_argument("--save", type=Path, help="write the executed notebook here")
    parser.add_argument("--timeout", type=int, default=600, help="seconds for one cell")
    options = parser.parse_args(argv)
    if not options.notebook.is_file():
        parser.error(f"there is no notebook {options.notebook}")
    return execute(options.notebook, options.save, options.timeout)


if __name__ == "__main__":
    sys.exit(main())
