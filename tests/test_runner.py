"""The runner of the tests itself: tiers, shards, durations, and the environment that it makes."""

from __future__ import annotations

import ast
import io
import json
import re
import subprocess
import sys
import tokenize
import uuid
from pathlib import Path

import pytest

from tests import conftest, durations, environment
from tests.durations import Spent
from tests.layers import ROOT
from tests.tiers import Reader, Tier, concerns


def starts_nothing() -> int:
    return len(sys.path)


def starts_by_a_helper() -> object:
    return _helper()


def _helper() -> object:
    return [subprocess.run(["true"]) for _ in range(1)]


class Starter:
    def __init__(self) -> None:
        self.process = subprocess.Popen(["true"])


def starts_by_a_class() -> object:
    return Starter()


def starts_by_an_import_inside() -> object:
    from tests.lab.notebook import opened

    return opened


def starts_by_a_pool() -> object:
    import skymagic as sky

    return sky.Compute(nodes=2)


def starts_a_host() -> object:
    from tests.lab.places import pooled

    return pooled


@pytest.mark.parametrize(
    ("function", "tier"),
    [
        (starts_nothing, Tier.quick),
        (starts_by_a_helper, Tier.near),
        (starts_by_a_class, Tier.near),
        (starts_by_an_import_inside, Tier.near),
        (starts_by_a_pool, Tier.near),
        (starts_a_host, Tier.far),
    ],
)
def test_a_tier_is_read_from_the_code(function: object, tier: Tier) -> None:
    assert Reader().tier([function])[0] is tier


def test_programs_run_only_in_certain_folders() -> None:
    reader = Reader()
    assert reader.tier([starts_by_a_helper], "programs")[0] is Tier.far
    assert reader.tier([starts_nothing], "programs")[0] is Tier.quick


STARTS = [
    "subprocess.run(['true'])",
    "os.fork() or os._exit(0)",
    "os.posix_spawn('/bin/true', ['true'], {})",
]
HIDDEN = """
import os, subprocess, time
import pytest

@pytest.mark.parametrize("start", {starts})
@pytest.mark.parametrize("swallowed", [False, True])
def test_hidden(start, swallowed):
    try:
        eval(start, {{"os": os, "subprocess": subprocess}})  # the reader cannot see it
    except Exception:
        if not swallowed:
            raise

def test_seen():
    time.sleep(0.2)
    subprocess.run(["true"])
"""


IN_ORDER = """
import pytest

pytestmark = pytest.mark.in_order
before = []

def test_first():
    before.append(1)

def test_second():
    assert before == [1]
    assert not FAILS

def test_last():
    assert before
"""


def run_of(folder: Path, *words: str) -> str:
    """What a run of the tests in a folder of their own says."""
    words = (
        "-p",
        "tests.conftest",
        "--rootdir",
        str(folder),
        "-c",
        str(ROOT / "pyproject.toml"),
        *words,
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words, str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    return done.stdout + done.stderr


def test_tests_in_order_are_run_again_together(tmp_path: Path) -> None:
    cache = f"-ocache_dir={tmp_path}/cache"
    (tmp_path / "test_one.py").write_text(f"FAILS = True\n{IN_ORDER}")
    assert "1 failed, 2 passed" in run_of(tmp_path, cache, "-n2", "--dist=loadfile")
    (tmp_path / "test_one.py").write_text(f"FAILS = False\n{IN_ORDER}")
    assert "3 passed" in run_of(tmp_path, cache, "--last-failed")


def test_a_stray_interrupt_fails_one_test(tmp_path: Path) -> None:
    (tmp_path / "test_one.py").write_text(
        "def test_pressed():\n    raise KeyboardInterrupt\n\ndef test_next():\n    pass\n"
    )
    assert "1 failed, 1 passed" in run_of(tmp_path, "-n2", "-pno:cacheprovider")
    assert "no tests ran" in run_of(tmp_path, "-pno:cacheprovider")


def test_quick_test_with_a_process_fails_and_time_is_reported(
    tmp_path: Path,
) -> None:
    """Also if the test catches the failure as its own error."""
    (tmp_path / "test_one.py").write_text(HIDDEN.format(starts=STARTS))
    output = run_of(tmp_path, "-p", "no:cacheprovider")
    assert "6 failed, 1 passed" in output
    said = "this test is of the tier quick, in which no process starts, and has started one"
    assert output.count(f"{said}: ") >= 6
    (row,) = [line.split() for line in output.splitlines() if line.endswith("  test_one.py")]
    seconds, starting, asleep, processes, tests, _ = row
    assert float(seconds) >= float(asleep) >= 0.2
    assert (int(processes), int(tests)) == (7, 7)
    assert float(starting) < float(seconds)
    kept = json.loads((tmp_path / "build/durations.json").read_text())
    assert kept["test_one.py"]["tests"] == kept["test_one.py"]["of"] == 7


IMPURE = """
import socket
import pytest

def test_opens(tmp_path):
    with socket.socket(socket.AF_UNIX) as opened:
        opened.bind(str(tmp_path / "s"))

def test_swallows():
    with socket.socket() as opened, pytest.raises(Exception):
        opened.connect(("127.0.0.1", 1))

def test_is_pure():
    assert socket.AF_INET
"""


def test_a_unit_test_uses_no_socket_and_starts_no_process(tmp_path: Path) -> None:
    path = tmp_path / "tests/unit/test_one.py"
    path.parent.mkdir(parents=True)
    path.write_text(IMPURE)
    output = run_of(tmp_path, "-p", "no:cacheprovider")
    assert "2 failed, 1 passed" in output
    assert "this test is in tests/unit, whose modules are pure, and uses a socket" in output
    path.write_text("import subprocess\ndef test_starts():\n    subprocess.run(['true'])\n")
    said = "tests/unit/test_one.py::test_starts is no unit test: it uses subprocess.run"
    assert said in run_of(tmp_path, "-p", "no:cacheprovider")


# -- durations and shards ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 4, 7])
def test_the_shards_are_the_whole(count: int) -> None:
    names = [path.relative_to(ROOT).as_posix() for path in ROOT.glob("tests/**/test_*.py")]
    kept = durations.kept()
    weights = {name: kept.get(name, 1.0) for name in names}
    parts = durations.shards(weights, count)
    assert sorted(name for part in parts for name in part) == sorted(names)
    loads = [sum(weights[name] for name in part) for part in parts]
    assert max(loads) - min(loads) <= max(weights.values())


def test_shards_are_the_same_everywhere() -> None:
    weights = {f"{number}": 1.0 for number in range(9)}
    assert durations.shards(weights, 4) == durations.shards(dict(reversed(weights.items())), 4)


@pytest.mark.parametrize("text", ["0/4", "5/4", "4", "a/b", ""])
def test_invalid_shards_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"is no shard|invalid literal"):
        durations.shard(text)


def test_ci_runs_all_shards() -> None:
    (line,) = [
        line
        for line in (ROOT / ".github/workflows/ci.yml").read_text().splitlines()
        if "shard:" in line
    ]
    wanted = [part.strip(' "') for part in line.partition("[")[2].rstrip("]").split(",")]
    assert wanted == [f"{number}/{len(wanted)}" for number in range(1, len(wanted) + 1)]


def test_workers_times_are_summed() -> None:
    parts = [
        durations.plain({"a": Spent(1.0, 0.5, 0.1, 2, 3, 5)}),
        durations.plain({"a": Spent(2.0, 0.0, 0.0, 1, 2, 5)}),
    ]
    assert durations.merged(parts) == {"a": Spent(3.0, 0.5, 0.1, 3, 5, 5)}


def test_the_table_is_kept_by_whole_files() -> None:
    run = {
        "whole": Spent(9.0, tests=3, of=3),
        "part": Spent(1.0, tests=1, of=3),
        "short": Spent(0.1, tests=1, of=1),
    }
    table = {"whole": 5.0, "part": 7.0, "other": 2.0, "gone": 3.0, "short": 4.0}
    assert durations.updated(table, run, lambda name: name != "gone") == {
        "whole": 9.0,
        "part": 7.0,
        "other": 2.0,
    }


def test_partial_rerun_keeps_golden_files(tmp_path: Path) -> None:
    path = tmp_path / "durations.json"
    durations.save({"whole": Spent(9.0, tests=3, of=3), "new": Spent(1.0, tests=1, of=2)}, path)
    durations.save({"whole": Spent(1.0, tests=1, of=3)}, path)
    assert durations.merged([json.loads(path.read_text())])["whole"] == Spent(9.0, tests=3, of=3)
    assert "new" in json.loads(path.read_text())


def test_how_busy_the_cores_were() -> None:
    assert " 75 % " in durations.used((10.0, 100.0), (19.0, 112.0))
    assert durations.used((0.0, 0.0), (0.0, 0.0)) == ""


@pytest.mark.parametrize(
    ("text", "held"),
    [
        ("import skymagic.data.values", True),
        ("from skymagic.data import capture", True),
        ("from skymagic import database", False),
        ("", False),
    ],
)
def test_a_file_concerns_a_room_by_its_imports(tmp_path: Path, text: str, held: bool) -> None:
    path = tmp_path / "test_a.py"
    path.write_text(text)
    assert concerns(path, tmp_path / "tests", "data") is held
    assert concerns(path, tmp_path.parent, tmp_path.name)
    assert concerns(tmp_path / "unit/data/test_a.py", tmp_path, "data")


# -- the environment -----------------------------------------------------------------------------------------------------


def test_uv_is_configured_like_pip() -> None:
    listed = "\n".join([
        "global.index-url='https://one.example/simple'", "global.find-links='/a /b'", "global.extra-index-url='\\nfile:///c\\nfile:///d'",
        "install.index-url='https://two.example/simple'", "user.name='x'", ":env:.find-links='/e'", "global.timeout='60'",
    ])  # fmt: skip
    found = environment.variables(environment.options(listed), {"UV_INDEX": "mine", "HOME": "/h"})
    assert found == {
        "UV_INDEX_STRATEGY": "unsafe-best-match", "UV_DEFAULT_INDEX": "https://two.example/simple", "UV_FIND_LINKS": "/e",
        "UV_INDEX": "mine", "HOME": "/h",
    }  # fmt: skip


# -- what a run leaves behind -----------------------------------------------------------------------------------------------


def test_shared_memory_that_a_run_leaves_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also that of libraries; segments that existed before do not count."""
    for deadline in ("DEADLINE", "NEIGHBOURS_DEADLINE"):
        monkeypatch.setattr(conftest, deadline, 0.0)
    kinds = ("psm", "joblib_memmapping_folder", "sem.loky", "torch", "skymagic")
    left = {Path(f"/dev/shm/{kind}_{uuid.uuid4().hex}") for kind in kinds}
    for path in left:
        path.touch()
    try:
        before = conftest.traces()
        assert {*map(str, left)} <= {*conftest.paths_left(before - left)}
        assert not {*map(str, left)} & {*conftest.paths_left(before)}
    finally:
        for path in left:
            path.unlink()


# -- promises ----------------------------------------------------------------------------------------------------------

PROMISES = 13
FAILURES = 8
FIRST_HOUR = 15
"""Mistakes of a newcomer."""
SECURITY_PROMISES = 26


@pytest.mark.parametrize(
    "path", sorted((ROOT / "tests" / "promises").glob("*.py")), ids=lambda path: path.stem
)
def test_promises_name_no_internals(path: Path) -> None:
    tree = ast.parse(path.read_text())
    imported = [
        name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in [getattr(node, "module", None) or "", *(alias.name for alias in node.names)]
    ]
    assert [name for name in imported if name.partition(".")[0] == "skymagic"] == []
    # within cells too: `import skymagic as sky` is public, its modules are not
    texts = [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    assert [text for text in texts if re.search(r"\bskymagic\.\w|from skymagic\b", text)] == []
    private = [
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr.startswith("_")
    ]
    assert private == []


def test_each_promise_names_tests_that_exist() -> None:
    rows = re.findall(
        r"^\| (\d+\.|failure:|hour:) .*? \| (.*) \|$",
        (ROOT / "tests/README.md").read_text(),
        re.MULTILINE,
    )
    numbers = [number for number, _ in rows]
    assert numbers == [
        *(f"{number}." for number in range(1, PROMISES + 1)),
        *["failure:"] * FAILURES,
        *["hour:"] * FIRST_HOUR,
    ]
    named = [re.findall(r"`(\S+?)::(\w+)`", cell) for _, cell in rows]
    assert all(named)
    assert not [
        f"{file}::{test}" for row in named for file, test in row if test not in _tests(ROOT / file)
    ]


def test_each_promise_of_security_names_tests_that_exist() -> None:
    """Each row of SECURITY.md's table of promises; the tables above and below it have no tests."""
    _, _, section = (ROOT / "SECURITY.md").read_text().partition("## Promises and their tests\n")
    table = section.partition("\n## ")[0]
    rows = re.findall(r"^\| (?!promise \||---)(.+?) \| ([^|]*) \|$", table, re.MULTILINE)
    assert len(rows) == SECURITY_PROMISES
    named = [re.findall(r"`(\S+?)::(\w+)`", cell) for _, cell in rows]
    assert all(named)
    assert not [
        f"{file}::{test}" for row in named for file, test in row if test not in _tests(ROOT / file)
    ]


def _tests(path: Path) -> set[str]:
    """The test functions of a file; none where there is no file."""
    functions = ast.parse(path.read_text()).body if path.exists() else []
    return {one.name for one in functions if isinstance(one, ast.FunctionDef)}


# -- sleeps --------------------------------------------------------------------------------------------------------------


def _sleeps_without_reason(text: str) -> list[int]:
    """Lines of a module that sleep, with no comment there or alone on the line above. What cells do is in strings, and not looked at."""
    calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    sleeps = [
        call.lineno
        for call in calls
        if getattr(call.func, "attr", getattr(call.func, "id", "")) == "sleep"
    ]
    if not sleeps:
        return []
    comments = {
        token.start[0]: token.line.lstrip().startswith("#")
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type == tokenize.COMMENT
    }
    return [line for line in sleeps if line not in comments and not comments.get(line - 1)]


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("time.sleep(1)", [1]),
        ("x = 1  # one\nsleep(x)", [2]),
        ("async def f():\n    await asyncio.sleep(1)", [2]),
        ("time.sleep(1)  # why", []),
        ("# why\ntime.sleep(1)", []),
        ("run('time.sleep(1)')", []),
    ],
)
def test_a_sleep_without_a_reason_is_found(text: str, lines: list[int]) -> None:
    assert _sleeps_without_reason(text) == lines


def test_each_sleep_of_a_test_has_its_reason() -> None:
    """Tests wait for events; otherwise `tests.lab.waiting.until` polls."""
    found = {
        path.relative_to(ROOT): _sleeps_without_reason(path.read_text())
        for path in ROOT.glob("tests/**/*.py")
    }
    assert {path: lines for path, lines in found.items() if lines} == {}
