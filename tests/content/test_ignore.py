"""What stays behind when a folder goes along: git itself says what is right."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from skymagic.content.files.ignore import unignored
from skymagic.content.transfer.listing import FILE
from tests.content.test_files import grow
from tests.lab.golden import Golden

ENVIRONMENT = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}


def by_git(repository: Path, below: str = ".") -> set[str]:
    """The files that git would take, below a folder of it."""
    if not (repository / ".git").exists():
        subprocess.run(["git", "init", "-q"], cwd=repository, env=ENVIRONMENT, check=True)
    command = [
        "git",
        "-c",
        "core.excludesFile=",
        "ls-files",
        "-z",
        "--others",
        "--exclude-standard",
    ]
    listed = subprocess.run(
        command, cwd=repository / below, env=ENVIRONMENT, capture_output=True, check=True
    )
    return set(filter(None, os.fsdecode(listed.stdout).split("\0")))


def by_us(folder: Path) -> set[str]:
    found = unignored(folder)
    assert not found.problems
    return {entry.path for entry in found.entries if entry.kind == FILE}


FILES = {
    "a.py": "", "a.log": "", "keep.log": "", "data/x.bin": "", "data/sub/y.bin": "", "src/data/z.bin": "", "src/a.log": "",
    "src/deep/b.tmp": "", "src/deep/keep.tmp": "", "build/out.o": "", "src/build/out.o": "", "src/keep.log": "",
    " lead": "", "#hash": "", "!bang": "", "[x].txt": "", "x.txt": "", "docs/a/b/c.md": "", "docs/c.md": "", "UP.LOG": "",
    "trail ": "", "ü.log": "", "src/only/this": "", "src/only/that": "",
}  # fmt: skip
LEVELS: list[dict[str, str]] = json.loads(Path(__file__).with_name("ignore_cases.json").read_text())
"""The text of each folder's ``.gitignore``, by case."""


def lay(folder: Path, levels: dict[str, str]) -> Path:
    return grow(
        folder, FILES | {f"{where}/.gitignore".lstrip("/"): text for where, text in levels.items()}
    )


@pytest.mark.parametrize("levels", LEVELS)
def test_as_git_has_it(tmp_path: Path, levels: dict[str, str]) -> None:
    lay(tmp_path, levels)
    assert by_us(tmp_path) == by_git(tmp_path)


@pytest.mark.parametrize("levels", LEVELS)
@pytest.mark.parametrize("below", ["src", "docs/a"])
def test_a_folder_below_the_repository(tmp_path: Path, levels: dict[str, str], below: str) -> None:
    lay(tmp_path, levels)
    theirs = by_git(tmp_path, below)
    question = ["git", "check-ignore", "-q", below]
    if subprocess.run(question, cwd=tmp_path, env=ENVIRONMENT).returncode:
        assert by_us(tmp_path / below) == theirs


def test_excluded_folder_can_be_requested(tmp_path: Path) -> None:
    grow(
        tmp_path,
        {".git/config": "", ".gitignore": "/runs/\n*.log\n", "runs/a.py": "", "runs/b/a.log": ""},
    )
    assert by_us(tmp_path) == {".gitignore"}
    assert by_us(tmp_path / "runs") == {"a.py"}


PARTS = ["a", "b", "*", "**", "?", "a*", "[ab]", "ab", "[!a]", "a**", "***", "\\\\a", "[b-]", ""]
PATTERNS = st.builds(
    lambda bang, start, parts, end: bang + start + "/".join(parts) + end,
    st.sampled_from(["", "", "!"]),
    st.sampled_from(["", "/"]),
    st.lists(st.sampled_from(PARTS), min_size=1, max_size=3),
    st.sampled_from(["", "/"]),
)
IGNORES = st.lists(PATTERNS, max_size=4).map("\n".join)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(top=IGNORES, inner=IGNORES)
def test_any_patterns(tmp_path: Path, top: str, inner: str) -> None:
    names = [f"{x}/{y}/{z}" for x in ("a", "b", "ab") for y in ("a", "b") for z in ("a", "b", "ab")]
    grow(tmp_path, {**dict.fromkeys(names, ""), "c": "", ".gitignore": top, "a/.gitignore": inner})
    assert by_us(tmp_path) == by_git(tmp_path)


def test_some_files_are_never_copied(tmp_path: Path) -> None:
    grow(
        tmp_path,
        {
            "a": "",
            ".git": "gitdir: elsewhere",
            "sub/.git/config": "",
            "sub/b": "",
            "x/__pycache__/x.pyc": "",
        },
    )
    assert by_us(tmp_path) == {"a", "sub/b"}
    grow(tmp_path, {".gitignore": "!__pycache__/\n!.git\n"})
    assert by_us(tmp_path) == {"a", "sub/b", ".gitignore", "x/__pycache__/x.pyc"}


def test_no_such_folder(golden: Golden, tmp_path: Path) -> None:
    golden(unignored(tmp_path / "no").problems)
    found = unignored(tmp_path, includes=["lost"])
    golden(found.problems)
