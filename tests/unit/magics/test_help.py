"""What completion offers is there: every option, every name."""

from __future__ import annotations

import pytest

from skymagic import plugins, providers
from skymagic.magics.arguments.help import CompletionNames, complete, help_alone
from skymagic.magics.arguments.options import MAGICS, Option
from skymagic.magics.completion import assigned
from tests.unit.magics.test_arguments import PARSERS

# ------------------------------------------------------------------------------------------ completion


def test_common_options_are_listed_first() -> None:
    offered = complete("sky_broadcast", "-")
    common = [
        "-o",
        "--output",
        "--only",
        "-g",
        "--gather",
        "--head",
        "-t",
        "--targets",
        "--timeout",
        "-a",
        "--noblock",
    ]
    assert offered[: len(common)] == common
    assert complete("sky_pool", "--pro")[:2] == ["--provider", "--procs-per-node"]


NAMES = CompletionNames(
    pools=("train",),
    variables=("model",),
    rank_variables=("model",),
    gathered=("model",),
    hosts=("gpu1",),
    environment=("HF_TOKEN",),
    leftovers=("lab",),
    plugins=tuple(plugins.names()),
    plugin_options=plugins.options,
    providers=("auto", *providers.names()),
)
VALUES = {
    "provider": "auto",
    "aws|slurm|kubernetes|ray": "kubernetes",
    "auto|HOST:PORT|ray://…": "ray://head:10001",
    "N": "2",
    "N[+]": "2+",
    "cr-…|auto": "auto",
    "GB[+]": "2+",
    "N|auto": "auto",
    "NAME[:COUNT]": "A100:1",
    "WHICH": "A100:1",
    "NAME[:k=v,…]": "torch",
    "VERSION|PATH": "3.12",
    "PACKAGES": "numpy",
    "NAME=VALUE": "A=1",
    "HOSTS": "gpu1",
    "IMAGE": "podman:python:3.12",
    "FOLDERS": "/data",
    "TIME": "10m",
    "RANK": "0",
    "RANKS": "0",
    "NODES": "0",
    "R": "0",
    "NAMES": "model",
    "DIR": ".",
    "LINES": "5",
    "ID": "3",
    "DOLLARS": "12.50",
    "wait|refuse": "wait",
    "CLIENT": "auto",
    "slurm": "slurm",
}
"""By its field, or by what help calls it: a value that is right."""
WORDS = {
    "RANKS NAMES": "2 model",
    "NAMES": "model",
    "SRC DST": "a b",
    "PORTS": "6006",
    "on|off": "on",
    "install NAMES|list": "list",
}
"""What a magic's line needs beside its options."""
NEEDED = {
    ("", "--head"): "-o r",
    ("sky_pool", "--hosts"): "--provider ssh",
    ("sky_broadcast", "--hosts"): "--provider ssh",
    ("sky_clone", ""): "--from 0",
    ("sky_clone", "--from"): "",
    ("sky_status", "--disk"): "--hosts gpu1",
    ("sky_gpus", ""): "A100",
    ("sky_status", "-o"): "",
    ("sky_status", "--output"): "",
    ("sky_down", "--clean"): "--hosts gpu1",
    ("sky_down", "--dry-run"): "--clean --hosts gpu1",
    ("sky_attach", "--take-over"): "lab",
    **{
        (magic, "--login"): "--provider slurm" for magic in ("sky_attach", "sky_down", "sky_status")
    },
    ("sky_attach", "--provider"): "--login cluster",
}
"""(magic or any, option or any other) → what stands beside it."""


def line_with(magic: str, option: Option, name: str, value: str = "") -> str:
    """A line on which an option has this value, or one that is right, and what it cannot be without."""
    wanted = (
        ""
        if option.read is None
        else value or VALUES.get(option.metavar) or VALUES.get(option.field, "model")
    )
    beside = NEEDED.get((magic, name), NEEDED.get((magic, ""), NEEDED.get(("", name), "")))
    return f"{name} {wanted} {beside}"


@pytest.mark.parametrize("magic", MAGICS)
def test_every_completion_is_accepted(magic: str) -> None:
    face = MAGICS[magic]
    known = {name: option for option in face.accepted for name in option.spellings}
    words = WORDS.get(face.positional, "")
    for mark in ("-", "--"):
        for name in complete(magic, mark, NAMES):
            assert name in known[name].names
            PARSERS[magic](f"{line_with(magic, known[name], name)} {words}")
    for name, option in known.items():
        for value in complete(magic, f"{name} ", NAMES) if option.read is not None else ():
            PARSERS[magic](f"{line_with(magic, option, name, value)} {words}")
            assert complete(magic, f"{name} {value}", NAMES)[0] == value, (
                "and it stays when more is typed"
            )
    for word in complete(magic, "", NAMES):
        PARSERS[magic](f"{word} pandas" if word == "install" else word)
    if magic == "sky_clone":
        assert complete(magic, "2 mo", NAMES) == ["model"]


def test_completed_names_exist() -> None:
    assert set(CompletionNames().providers) == {"auto", *providers.TABLE}
    assert set(CompletionNames().plugins) == set(plugins.TABLE)


def test_names_that_a_cell_sets_complete_before_it_is_whole() -> None:
    whole = "import numpy as np\nfrom a import b\nfor step in range(3):\n    total += step\ndef train(x):\n    inner = 1\n"
    assert assigned(whole) == {"step", "total", "train"}
    assert assigned(
        f"{whole}loss: float = 1\na, best = 1, 2\nif loss == best\n    _hidden = ("
    ) >= {
        "loss",
        "a",
        "best",
    }
    assert assigned("") == set()


@pytest.mark.parametrize(
    "cell",
    [
        "%%sky_broadcast\nx = '--help'",
        "%%sky_sh\ntorchrun --help",
        "%%sky_broadcast -o r # --help\n1",
    ],
)
def test_help_of_something_else_is_none_of_ours(cell: str) -> None:
    lines = cell.splitlines(keepends=True)
    assert help_alone(lines) == lines
