"""The hook for the time before a machine is taken away, in a process of its own as on a rank: signals, limits, forks."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

from skymagic.kernels.agent import ending
from skymagic.runtime.interruption import NOWHERE, on_interruption
from tests.lab.golden import Golden

START = """
import os, signal, threading, time
from skymagic.runtime import interruption
from skymagic.runtime.interruption import Interruption, on_interruption
ended = []
interruption.attach(3, lambda seconds, error: ended.append(error))
notice = Interruption("taken back", (2, 3), True, time.time() + 60)
def tell(): threading.Thread(target=interruption.notify, args=(notice,)).start()
"""


def said(body: str) -> list[str]:
    """What a process that has attached prints."""
    program = START + textwrap.dedent(body)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_it_runs_on_the_main_thread_while_that_is_at_work() -> None:
    assert said("""
        done = False
        @on_interruption
        def save(told):
            global done
            done = threading.current_thread() is threading.main_thread()
            print(told.reason, told.ranks, told.mine, 55 < told.seconds_left <= 60)
        tell()
        while not done:
            pass
        print(ended)
    """) == ["taken back (2, 3) True True", "['']"]


def test_hook_wakes_a_waiting_rank_or_runs_once_set() -> None:
    assert said("""
        told = threading.Event()
        interruption.notify(notice)
        on_interruption(lambda one: print("late", one.ranks))
        on_interruption(lambda one: told.set())
        tell()
        print(told.wait())
        on_interruption(None)
        interruption.notify(notice)
        print(len(ended))
    """) == ["late (2, 3)", "True", "2"]


def test_hook_may_fail_or_time_out_and_the_cell_continues() -> None:
    assert said("""
        def hangs(told):
            while True:
                try:
                    time.sleep(60)
                except TimeoutError:
                    if ended:
                        raise
                    ended.append("caught")
        interruption.REPEAT = 0.05
        on_interruption(hangs, limit=0.05)
        tell()
        while len(ended) < 2:
            time.sleep(0.01)
        on_interruption(lambda told: 1 / 0)
        tell()
        while len(ended) < 3:
            time.sleep(0.01)
        print(ended)
    """) == [
        "['caught', 'TimeoutError: the on_interruption hook took too long', 'ZeroDivisionError: division by zero']"
    ]


def test_slurm_signals_call_the_hook_but_not_in_forks() -> None:
    assert said("""
        on_interruption(lambda told: print(told.reason, told.ranks, told.at, flush=True), signals=[signal.SIGTERM, signal.SIGUSR1])
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGTERM)
        came, there = os.pipe()
        child = os.fork()
        while not child:  # Python forgets signals that come during a fork
            there is not None and os.write(there, b"x")
            there = None
        os.read(came, 1)
        os.kill(child, signal.SIGTERM)
        print(os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGTERM)
        on_interruption(None)
        print(signal.getsignal(signal.SIGTERM) == signal.SIG_DFL)
    """) == ["SIGUSR1 received (3,) None", "SIGTERM received (3,) None", "True", "True"]


def test_outside_a_rank_a_warning_says_no_call(golden: Golden) -> None:
    with pytest.warns(UserWarning, match="on_interruption|called") as found:
        on_interruption(print)
    assert str(found[0].message) == NOWHERE
    with golden.raises(TypeError):
        on_interruption(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="seconds above 0"):
        on_interruption(print, limit=0)


def test_ec2_notices_are_parsed(golden: Golden) -> None:
    """In the form of EC2's documentation."""
    taken = ending.action('{"action": "terminate", "time": "2017-09-18T08:22:00Z"}')
    assert taken is not None
    assert taken.at == 1505722920.0
    golden(taken.reason)
    assert ending.rebalance('{"noticeTime": "2020-10-27T08:22:00Z"}').at is None
