"""A forked kernel is what a started one is."""

from __future__ import annotations

import os
from pathlib import Path

import psutil

from tests.lab.notebook import opened

SEEN = {
    "path": "__import__('sys').path",
    "arguments": "[each for each in __import__('sys').argv if not each.endswith('.json')]",
    "flags": "repr(__import__('sys').flags)",
    "folder": "__import__('os').getcwd()",
    "environment": "{k: v for k, v in __import__('os').environ.items() if k != 'JPY_PARENT_PID'}",
    "signals": "[repr(__import__('signal').getsignal(each)) for each in __import__('signal').valid_signals()]",
    "leads a session": "__import__('os').getsid(0) == __import__('os').getpid()",
    "main": "sorted(vars(__import__('sys').modules['__main__']))",
}
MODULES = "sorted(__import__('sys').modules)"
HEAVY = {"numpy", "torch", "boto3", "paramiko", "pandas"}


def test_both_see_the_same(tmp_path: Path) -> None:
    with opened(tmp_path, fresh=True) as started:
        expected = {name: started.value(expression) for name, expression in SEEN.items()}
        imported = set(started.value(MODULES))
    with opened(tmp_path) as forked:
        assert {name: forked.value(expression) for name, expression in SEEN.items()} == expected
        modules = set(forked.value(MODULES))
    assert imported - modules == set(), "add what brings them to IMPORTED"
    assert modules & (HEAVY - imported) == set()


def test_interpreter_start_files_are_separate(tmp_path: Path) -> None:
    with opened(tmp_path, env={"PYTHONHASHSEED": "7"}) as notebook:
        assert "ipykernel_launcher" in psutil.Process(notebook.pid).cmdline()[2]
        assert psutil.Process(notebook.pid).ppid() == os.getpid()
