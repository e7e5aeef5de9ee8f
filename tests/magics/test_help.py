"""Help, completion and corrections of mistyped names, in a notebook."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from skymagic.magics.arguments.help import help_text
from skymagic.magics.arguments.options import MAGICS
from tests.lab.golden import Golden
from tests.lab.notebook import ANSI, Notebook, opened


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    """A notebook without a pool."""
    folder = tmp_path_factory.mktemp("help")
    with opened(folder, env={"HOME": str(folder), "SKY_MAGICAL_TOKEN": "x"}) as one:
        yield one


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
