"""A server that executes cells by itself (jupyter-server-nbmodel): a kernel of its is killed, and the next one attaches."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from tests.lab.desk import local_desk, without_repeats
from tests.lab.notebook import ROOT, Shown, own_folders
from tests.lab.servers import Outputs, needed, server
from tests.lab.waiting import until

STEPS, SEEN = 40, 20
CELL = """%%sky_broadcast -o values -g name
import os, time
for step in range({steps}):
    print('step', step, flush=True)
    while step == {seen} and not os.path.exists({gate!r}): time.sleep(0.02)
name = [step] * 1000
step + int(os.environ['RANK'])"""


def shown(outputs: Outputs) -> Shown:
    """The outputs that a server keeps, as a person sees them."""
    seen = Shown()
    for one in outputs:
        seen.add(
            one["output_type"],
            {name: value for name, value in one.items() if name != "output_type"},
        )
    return seen


def test_a_kernel_is_killed_and_another_attaches(tmp_path: Path) -> None:
    needed()
    folder, gate = tmp_path / "server", tmp_path / "gate"
    folder.mkdir()
    with (
        local_desk(tmp_path) as desk,
        server(
            folder, {**os.environ, **own_folders(folder), **desk.env, "PYTHONPATH": str(ROOT)}
        ) as served,
    ):
        process = int(shown(served.run("import os\nprint(os.getpid())")).stdout)
        served.run(f"%load_ext skymagic\n{desk.made}")
        going = served.begin(CELL.format(steps=STEPS, seen=SEEN, gate=str(gate)))
        until(lambda: f"step {SEEN // 2}" in shown(served.so_far(going)).lines)
        os.kill(process, signal.SIGKILL)
        gate.touch()
        served.new_kernel()
        assert f"%sky_attach {desk.pool} " in shown(served.run("%load_ext skymagic")).stdout
        attached = shown(served.run(f"%sky_attach {desk.pool}"))
        both = without_repeats([shown(served.so_far(going)), attached])
        assert [line for line in both if line.startswith("step ")] == [
            f"step {step}" for step in range(STEPS)
        ]
        taken = served.run(f"print((values, [len(each) for each in name]))\n%sky_down {desk.pool}")
        assert shown(taken).lines[0] == f"({[STEPS - 1, STEPS]}, [1000, 1000])"
