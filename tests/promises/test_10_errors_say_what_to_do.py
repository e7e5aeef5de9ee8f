"""Promise 10: misuse is refused in one line before anything starts, all mistakes at once; no error shows internal frames."""

from __future__ import annotations

import pytest

from tests.lab.notebook import Notebook, seen

MISUSES = {
    "an unknown option": ("%%sky_broadcast --outptu r\n1", "UsageError", "--output"),
    "an unknown magic option": ("%sky_pool lab --rank 2", "UsageError", "--rank"),
    "a rank that is not there": ("%%sky_broadcast -t 7\n1", "", "7"),
    "a bad time": ("%%sky_broadcast --timeout soon\n1", "UsageError", "soon"),
    "an unknown pool": ("%%sky_broadcast --pool nowhere\n1", "", "nowhere"),
    "a name that is none": ("%%sky_broadcast -o 1x\n1", "UsageError", "1x"),
    "pushing what is not there": ("%sky_push not_there_10", "", "not_there_10"),
    "pulling what is not there": ("%sky_pull not_there_10", "", "not_there_10"),
    "one per cent sign": ("%sky_broadcast\nx = 1", "UsageError", "%%sky_broadcast"),
    "an empty cell": ("%%sky_broadcast\n", "", ""),
}


@pytest.mark.parametrize("misuse", MISUSES)
def test_misuse_is_reported_without_internal_frames(pool: Notebook, misuse: str) -> None:
    cell, ename, words = MISUSES[misuse]
    shown = pool.finish(pool.start(cell))
    if misuse == "an empty cell":
        assert "Traceback" not in shown.said
        return
    failure = shown.failure
    assert not ename or failure.ename == ename
    assert words in failure.text
    assert "skymagic/" not in failure.text, "a frame of ours"
    assert len(failure.text.splitlines()) <= 6


def test_all_mistakes_are_reported_at_once(pool: Notebook) -> None:
    failure = pool.fail("%sky_pool wrong --nodes 0 --memory lots --idle never")
    assert ("nodes" in failure.text, "lots" in failure.text, "never" in failure.text) == (
        True,
        True,
        True,
    )
    assert seen(pool, "1") == [1, 1]


def test_an_error_shows_the_users_frames_alone(pool: Notebook) -> None:
    pool.run("def outer_10(x):\n    return inner_10(x)\ndef inner_10(x):\n    return x / 0")
    failure = pool.fail("%%sky_broadcast\nouter_10(1)")
    assert failure.ename == "ZeroDivisionError"
    assert "return x / 0" in failure.text
    assert "skymagic/" not in failure.text


def test_a_mistyped_name_is_explained(pool: Notebook) -> None:
    pool.run("learning_rate = 0.1")
    failure = pool.fail("%%sky_broadcast\nlearning_rat")
    assert failure.ename == "NameError"
    assert "learning_rate" in failure.text


def test_each_magic_has_help(pool: Notebook) -> None:
    names = pool.value(
        "sorted(name for kind in get_ipython().magics_manager.lsmagic().values() for name in kind if name.startswith('sky_'))"
    )
    assert {"sky_pool", "sky_broadcast", "sky_sh", "sky_attach", "sky_down"} <= set(names)
    for name in set(names):
        cells = pool.value(
            f"'{name}' in get_ipython().magics_manager.lsmagic()['cell'] and '{name}' not in get_ipython().magics_manager.lsmagic()['line']"
        )
        shown = pool.run(f"%%{name} --help\n" if cells else f"%{name} --help")
        assert name in shown.said


def test_a_dry_run_shows_the_plan_and_starts_nothing(pool: Notebook) -> None:
    shown = pool.run("%sky_pool planned --ranks 3 --provider local --dry-run")
    assert "3" in shown.said
    assert not pool.value("'planned' in str(__import__('skymagic').pools())")


def test_logs_cannot_control_the_terminal(pool: Notebook) -> None:
    pool.run("%%sky_broadcast\n" + r"print('\x1b]0;title\x07\x1b[2J')")
    shown = pool.run("%sky_logs -t 1 -n 5").stdout
    assert r"\x1b]0;title\x07\x1b[2J" in shown
    assert "\x1b" not in shown
