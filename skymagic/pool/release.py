"""Release in steps: each one runs whatever became of those before it, and each failure is told."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from skymagic.errors import PoolError

Step = tuple[str, Callable[[], object]]
"""(What is released, how)."""


def run_steps(done: str, steps: Sequence[Step]) -> None:
    """Run all steps, in this order. One that is interrupted is given up, and the others run.

    Args:
        done: what is so all the same, for the error: "pool 'main' is stopped".

    Raises:
        PoolError: steps have failed; names each of them.
        KeyboardInterrupt: the user did not want to wait; has a note on each step that failed.
    """
    failed: list[str] = []
    first: BaseException | None = None
    interrupt: BaseException | None = None
    for what, release in steps:
        try:
            release()
        except Exception as problem:
            failed.append(f"{what} ({type(problem).__name__}: {problem})")
            first = first or problem
        except BaseException as stop:
            interrupt = interrupt or stop
    told = f"{done}, but this was not released: {'; '.join(failed)}" if failed else ""
    if interrupt is not None:
        if told:
            interrupt.add_note(told)
        raise interrupt
    if told:
        raise PoolError(told) from first
