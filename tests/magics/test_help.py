"""What help and completion offer is there: every magic, every option, every name; and every magic tells its help."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from skymagic import plugins, providers
from skymagic.magics.arguments.help import CompletionNames, complete, help_alone, help_text
from skymagic.magics.arguments.options import MAGICS, Option
from skymagic.magics.completion import assigned
from tests.lab.golden import Golden
from tests.lab.notebook import ANSI, Notebook, opened
from tests.magics.test_arguments import PARSERS


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    """A notebook without a pool."""
    folder = tmp_path_factory.mktemp("help")
    with opened(folder, env={"HOME": str(folder), "SKY_MAGICAL_TOKEN": "x"}) as one:
        yield one


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


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("%sky_pool --plu", ["--plugin"]),
        ("pool = %sky_pool --plugin tor", ["torch"]),
        ("%sky_pool --provider lo", ["local"]),
        ("%sky_pool --gpu H100", ["H100"]),
        ("%sky_pool --region us-w", ["us-west-1", "us-west-2"]),
        ("%sky_gpus A100:8 --region us-east-1,eu-n", ["eu-north-1"]),
        ("%sky_pool --plugin torch:back", ["torch:backend="]),
        ("%sky_pool --hosts gp", ["gpu1", "gpu2"]),
        ("%sky_pool --procs-per-node a", ["auto"]),
        ("%sky_pool --secret SKY_MAG", ["SKY_MAGICAL_TOKEN"]),
        ("%sky_push weig", ["weights"]),
        (
            "%sky_status -",
            ["--cost", "--disk", "--hosts", "--login", "--output", "--pool", "--provider", "-o"],
        ),
        ("%sky_auto o", ["off", "on"]),
        ("%%sky_broadcast --timeout 10m -g wei", ["weighed", "weights"]),
        ("%%sky_broadcast -g weighed,lo", ["loss"]),
        ("%%sky_broadcast -g tor", []),
    ],
)
def test_the_shell_completes_with_tab(notebook: Notebook, line: str, offered: list[str]) -> None:
    notebook.run("import warnings; warnings.simplefilter('ignore'); weights = 1")
    config = notebook.folder / ".ssh" / "config"
    config.parent.mkdir(mode=0o700, exist_ok=True)
    config.write_text("Host gpu1 gpu2\n  User me\nHost gpu-* *\n  Port 22\n")
    config.chmod(0o600)
    cell = f"{line}\nimport torch\nweighed, loss = weights * 2, 0.0"
    found = (
        f"sorted(one.text for one in get_ipython().Completer.completions({cell!r}, {len(line)}))"
    )
    assert notebook.value(found) == offered


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
    ("cell", "nearest"),
    [
        ("%sky_staus", "sky_status"),
        ("%%sky_brodcast -o r\n1", "sky_broadcast"),
        ("%skypool --nodes 2", "sky_pool"),
    ],
)
def test_a_magic_that_is_spelt_wrong_suggests(notebook: Notebook, cell: str, nearest: str) -> None:
    failed = notebook.finish(notebook.start(cell))
    assert failed.error is not None
    assert (
        failed.text
        == f"UsageError: there is no magic {cell.split()[0]}; did you mean {nearest!r}?\n"
    )
    state = "get_ipython().check_complete('%sky_staus')[0]"
    assert notebook.value(state) == "complete", "what is being typed raises nothing"


@pytest.mark.parametrize(
    ("line", "nearest"),
    [
        ("%sky_pool --ranks 2 --plugin trch", "torch"),
        ("%sky_pool --provider loacl", "local"),
        ("%sky_gpus A10O", "A100"),
        ("%sky_pool --rank 2", "--ranks"),
        ("%%sky_broadcast --gatehr x\n1", "--gather"),
        ("%sky_auto onn", "on"),
    ],
)
def test_a_value_or_an_option_that_is_spelt_wrong_suggests(
    notebook: Notebook, line: str, nearest: str
) -> None:
    assert f"did you mean {nearest!r}?" in notebook.finish(notebook.start(line)).text


def test_documented_magics_are_registered(notebook: Notebook) -> None:
    registered = notebook.value(
        "sorted(name for kind in get_ipython().magics_manager.magics.values() for name in kind if name.startswith('sky_'))"
    )
    assert set(registered) == set(MAGICS)


# ------------------------------------------------------------------------------------------ help


@pytest.mark.parametrize("magic", MAGICS)
def test_help_option_only_prints_help(notebook: Notebook, magic: str) -> None:
    for mark in ("%", "%%"):
        for cell in (f"{mark}{magic} --help", f"{mark}{magic} -h"):
            assert notebook.run(cell).text == help_text(magic)
    assert "Examples:\n" in help_text(magic)
    name = f"{'%%' if MAGICS[magic].cell else '%'}{magic}"
    asked = notebook.value(f"get_ipython().object_inspect_text({name!r})")
    assert help_text(magic).strip() in ANSI.sub("", asked), f"what {name}? shows"
    assert notebook.run(f"%%{magic} --wat --help\nraise SystemExit").text == help_text(magic)
    line_magic = f"get_ipython().find_magic({magic!r})"
    assert notebook.value(f"{line_magic} and {line_magic}.__doc__") in (None, help_text(magic))


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


# ------------------------------------------------------------------------------------------ without a pool


@pytest.mark.parametrize("line", ["%sky_down", "%sky_down --all"])
def test_ending_a_missing_pool_is_no_error(golden: Golden, notebook: Notebook, line: str) -> None:
    golden(notebook.run(line).text)


def test_gpus_lists_local_devices_first(notebook: Notebook) -> None:
    first, *rest = notebook.run("%sky_gpus").lines
    assert "machine: " in first
    assert any(line.startswith("A100 ") for line in rest)


def test_excessive_ranks_are_refused_before_the_start(
    golden: Golden,
    notebook: Notebook,
) -> None:
    cores = notebook.value("len(__import__('os').sched_getaffinity(0))")
    many = 33 * cores
    for cell in (f"%sky_pool --ranks {many}", f"%%sky_broadcast --nodes {many}\nprint('it ran')"):
        shown = notebook.finish(notebook.start(cell))
        assert shown.error is not None
        assert shown.stdout == ""
        assert f"{many} ranks on " in shown.stderr
        assert len(shown.stderr.splitlines()) == 1
    plan = notebook.run("%sky_pool --dry-run --ranks " + str(many))
    assert re.search(r"^  asks .* 33 for each, .*add -y", plan.stdout, re.MULTILINE)
    assert "-y" not in notebook.run(f"%sky_pool --dry-run -y --ranks {many}").stdout
    assert "this machine need" in notebook.fail("%sky_pool -y --dry-run --ranks 1000000").text
    golden(notebook.run("%sky_status").stdout)
