"""The end of an agent by a signal, as Slurm, systemd and a logout send it: ranks that have an `on_interruption` hook run it first.

::

    SIGTERM ─▶ agent ─▶ Interruption ─▶ ranks     at once, where no rank has a hook
               agent ◀─ HookEnded    ◀─ ranks     then the agent ends; also once time is up, or at a second signal

Slurm signals all processes of a job: the notebook may be gone before the agent has heard, and the ranks may have heard themselves.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from types import FrameType

from skymagic.kernels.agent.loop import Loop

SIGNALLED = 128
"""What a signal's number is added to, for the exit status of an agent that was ended by it."""
ENDING = (signal.SIGTERM, signal.SIGHUP)
PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)
"""For ranks' hooks (``sbatch --signal=USR1@120``); agents outlive them."""
KILL_SECONDS = 30.0
"""Between Slurm's SIGTERM and its SIGKILL (KillWait)."""
HOOK_SECONDS = 26.0
"""For which hooks are waited for: 25 of their own, and their last words."""
ABANDONED_SECONDS = 1.0
"""For which an agent whose notebook is gone waits for a signal of its own, where a rank has a hook."""


class Ending:
    """How an agent ends that is signalled.

    Args:
        woken: the agent's `signal_pipe`.
        hooks: rank → how many times its hook has ended, of the ranks that have one.
        notify: called on the loop with the reason, once: has the hooks called.
    """

    def __init__(
        self, loop: Loop, woken: int, hooks: Callable[[], dict[int, int]], notify: Callable[[str, float], None]
    ) -> None:
        self._woken, self._hooks, self._notify = woken, hooks, notify
        self._number = 0
        """Of the signal."""
        self._before: dict[int, int] = {}
        self.due: float | None = None
        """Monotonic seconds at which it ends in any case; None while no hook is waited for."""
        loop.watch(woken, self._begin)
        for number in ENDING:
            signal.signal(number, self._on_signal)
        for number in PASSED_ON:
            signal.signal(number, signal.SIG_IGN)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        again, self._number = self._number, number
        if again or not self._hooks():
            sys.exit(SIGNALLED + number)

    def _begin(self) -> None:
        os.read(self._woken, 4096)
        if not self._number or self.due is not None:
            return
        self._before = self._hooks()
        self.due = time.monotonic() + HOOK_SECONDS
        self._notify(f"{signal.Signals(self._number).name} has come", time.time() + KILL_SECONDS)

    def end_if_over(self, now: float) -> None:
        """Raise SystemExit once all hooks have run, or their time is up."""
        if self.due is None:
            return
        after = self._hooks()
        if now >= self.due or all(after.get(rank) != ended for rank, ended in self._before.items()):
            sys.exit(SIGNALLED + self._number)

    def close(self) -> None:
        """From here on signals end it at once."""
        for number in ENDING:
            signal.signal(number, lambda number, _: sys.exit(SIGNALLED + number))
