"""Why a script failed, from what torchrun and its workers write: texts as torch 2.13 writes them, shortened."""

from __future__ import annotations

import json

import pytest

from skymagic.kernels.script.root_cause import (
    recorded_traceback,
    root_cause,
    tracebacks,
    without_frames,
    without_launcher,
)
from skymagic.wire.script import ScriptCause
from tests.lab.golden import Golden

BOX = """\
E1120 14:21:14.180000 15153 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: {code}) local_rank: 1 (pid: 15259) of binary: /venv/bin/python3
Traceback (most recent call last):
  File "/venv/bin/torchrun", line 8, in <module>
    sys.exit(main())
             ^^^^^^
  File "/venv/lib/python3.11/site-packages/torch/distributed/launcher/api.py", line 383, in launch_agent
    raise ChildFailedError(
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:{blank}
=======================================================
train.py FAILED
-------------------------------------------------------
Failures:
[1]:
  time      : 2026-11-20_14:21:14
  rank      : 0 (local_rank: 0)
  exitcode  : -15 (pid: 15257)  (SIGTERM)
-------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-20_14:21:14
  host      : localhost
  rank      : 3 (local_rank: 1)
  exitcode  : {code} (pid: 15259) {signal}
  error_file: <N/A>
  traceback : {said}
=======================================================
"""
FAILED = BOX.format(code=1, signal="", said="To enable traceback see: …", blank=" ")
KILLED = BOX.format(
    code=-9, signal=" (SIGKILL)", said="Signal 9 (SIGKILL) received by PID 15259", blank=" "
)
LOST_PEER = """\
[rank0]: Traceback (most recent call last):
[rank0]:   File "/home/me/train.py", line 7, in <module>
[rank0]:     dist.barrier()
[rank0]: RuntimeError: [/pytorch/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:8066. GLHF! 🏖️
"""
RAISED = """\
[rank3]: Traceback (most recent call last):
[rank3]:   File "/home/me/train.py", line 5, in step
[rank3]:     raise ValueError("bad batch")
[rank3]: ValueError: bad batch
"""
PLAIN = RAISED.replace("[rank3]: ", "")


def mixed(*texts: str) -> str:
    """Lines of several processes as they come when all write at once."""
    columns = [text.splitlines() for text in texts]
    longest = max(map(len, columns))
    return "\n".join(lines[i] for i in range(longest) for lines in columns if i < len(lines)) + "\n"


def found(recorded: str, tail: str) -> ScriptCause:
    """The cause that is in there."""
    cause = root_cause(recorded, tail)
    assert cause is not None
    return cause


@pytest.mark.parametrize(
    "tail",
    [
        RAISED + LOST_PEER + FAILED,
        LOST_PEER + RAISED + FAILED,
        mixed(LOST_PEER, RAISED) + FAILED,
        "step 1\n" + PLAIN + LOST_PEER + FAILED,
    ],
    ids=["first", "last", "mixed", "unlabelled"],
)
def test_the_cause_is_the_error_that_no_other_explains(golden: Golden, tail: str) -> None:
    cause = found("", tail)
    assert cause.text == PLAIN.strip()
    assert cause.summary == "ValueError: bad batch"
    golden(cause.worker)
    assert not cause.follows


def test_lost_peer_is_a_consequence() -> None:
    cause = found("", LOST_PEER + FAILED)
    assert cause.follows
    assert cause.summary.startswith("RuntimeError: ")


def test_killed_worker_is_the_cause_despite_torchruns_choice(
    golden: Golden,
) -> None:
    """torchrun dates a death by its detection, but an error by the time it was written."""
    other = FAILED.replace(
        "rank      : 0 (local_rank: 0)\n  exitcode  : -15 (pid: 15257)  (SIGTERM)", "{}"
    )
    killed = other.replace("{}", "rank      : 5 (local_rank: 3)\n  exitcode  : -9 (pid: 15261)")
    for recorded_there in ("", json.dumps({"message": LOST_PEER.replace("[rank0]: ", "")})):
        cause = found(recorded_there, LOST_PEER + killed)
        golden(cause.text)
        assert not cause.follows


@pytest.mark.parametrize("what", ["crashing. ", "hanging or bugs in the application. "])
def test_gloo_peer_error_is_a_consequence(what: str) -> None:
    said = f"RuntimeError: write failed. This is typically caused by a remote worker {what}Check its logs. GLHF!"
    cause = found(
        "", f'Traceback (most recent call last):\n  File "a.py", line 1, in <module>\n{said}'
    )
    assert cause.follows


def test_killed_worker_is_the_cause_despite_tracebacks(
    golden: Golden,
) -> None:
    cause = found("", LOST_PEER + KILLED)
    golden(cause.text)
    assert not cause.follows


def test_the_error_file_wins_over_the_log() -> None:
    stack = 'Traceback (most recent call last):\n  File "main.py", line 3, in main\n    1 / 0\nZeroDivisionError: division by zero\n'
    written = json.dumps(
        {
            "message": {
                "message": "ZeroDivisionError: …",
                "extraInfo": {"py_callstack": stack, "timestamp": "1"},
            }
        }
    )
    cause = found(written, RAISED + FAILED)
    assert cause.text == stack.strip()
    assert recorded_traceback(json.dumps({"message": "a word"})) == "a word"


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '"x"', "{}", '{"message": 3}', '{"message": {"extraInfo": 1}}']
)
def test_invalid_error_file_is_ignored(text: str) -> None:
    assert recorded_traceback(text) == ""
    assert root_cause(text, "") is None


def test_nothing_is_known_of_a_script_that_only_ends() -> None:
    assert root_cause("", "one\ntwo\n") is None
    assert root_cause("", FAILED) is None
    cut = 'Traceback (most recent call last):\n  File "x"'
    assert root_cause("", cut) is None


def test_last_unhandled_traceback_is_the_cause() -> None:
    earlier = PLAIN.replace("bad batch", "tried again")
    cause = found("", earlier + "going on\n" + PLAIN)
    assert cause.summary == "ValueError: bad batch"


def test_tracebacks_of_labelled_processes_are_separated() -> None:
    texts = tracebacks(mixed(RAISED, LOST_PEER, "just a line\nand another\n"))
    assert [text.rpartition("\n")[2][:12] for text in texts] == ["ValueError: ", "RuntimeError"]
    assert all("just a line" not in text for text in texts)


def test_torchruns_own_lines_are_left_out() -> None:
    assert without_launcher("step 1\n\n" + FAILED + "after\n") == ["step 1", "after"]
    assert without_launcher(PLAIN) == PLAIN.splitlines()
    cut = FAILED.partition("Failures:")[0]
    assert without_launcher("step 1\n" + cut) == ["step 1"]


def test_torchruns_own_frames_are_omitted() -> None:
    own = '  File "/v/lib/torch/distributed/elastic/agent/server/api.py", line 713, in _rendezvous\n    store = TCPStore(\n            ^^^^^^^^^\n'
    busy = (
        f"Traceback (most recent call last):\n{own}torch.distributed.DistNetworkError: EADDRINUSE"
    )
    assert without_frames(busy) == "torch.distributed.DistNetworkError: EADDRINUSE"
    joined = (
        f"{busy}\n\nThe above exception was the direct cause of the following exception:\n\n{PLAIN}"
    )
    assert (
        without_frames(joined).splitlines()[0] == "torch.distributed.DistNetworkError: EADDRINUSE"
    )
    assert without_frames(joined).endswith(PLAIN.strip())
    assert without_frames(PLAIN) == PLAIN.strip()


def test_lost_store_is_a_consequence_and_a_taken_port_a_cause() -> None:
    lost = "Traceback (most recent call last):\ntorch.distributed.elastic.rendezvous.api.RendezvousConnectionError: The connection to the C10d store has failed."
    cause = found("", lost)
    assert cause.follows
    cause = found(json.dumps({"message": f"DistNetworkError: EADDRINUSE\n\n{lost}"}), "")
    assert not cause.follows
