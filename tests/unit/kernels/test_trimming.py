"""Logs have a limit: the beginning of a long one is dropped, and all that is left is found where it was."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from skymagic.kernels.agent import logs
from skymagic.kernels.agent.logs import LOST
from skymagic.wire.agent import BeginOutput
from tests.kernels.filters import output_filter

LIMIT = 1 << 20
LINE = "{:099}\n"


@pytest.mark.skipif(
    not hasattr(os, "SEEK_DATA"), reason="the system does not tell of holes in files"
)
def test_a_long_log_keeps_its_end(tmp_path: Path) -> None:
    log, told = tmp_path / "rank-3.log", list[str]()
    reader, writer = os.pipe()
    spans = logs.Spans()
    output = output_filter(3, log, {"stdout": reader}, tell=told.append, spans=spans, limit=LIMIT)
    runs = {1: range(100), 2: range(100, 40_000), 3: range(40_000, 40_100)}
    for run, lines in runs.items():
        output.begin(BeginOutput(3, f"run-{run}", False, 1, 7, run), 0.0)
        for start in range(lines.start, lines.stop, 100):
            os.write(writer, "".join(map(LINE.format, lines[start - lines.start :][:100])).encode())
            output.drain(0.0)
        output.end(0.0)
    assert told == []
    found = log.stat()
    assert found.st_size > 3 * LIMIT
    assert found.st_blocks * 512 <= LIMIT
    path = str(log)
    gone, cut, whole = (logs.output_of_run(path, spans.find(run), None) for run in runs)
    assert (gone.text, gone.known, gone.over) == (LOST, True, True)
    first, *kept = cut.text.splitlines(keepends=True)
    assert first == LOST
    numbers = [int(line) for line in kept]
    assert numbers == [*range(numbers[0], 40_000)]
    assert len(numbers) > LIMIT // 2 // 100
    assert whole.text == "".join(map(LINE.format, runs[3]))
    everything = logs.last_lines(path, 10**6).text.splitlines()
    assert everything[0] == LINE.format(numbers[0]).rstrip()
    assert logs.last_lines(path, 2).text.split() == [
        LINE.format(n).rstrip() for n in (40_098, 40_099)
    ]
    assert logs.output_since(path, 5).text.startswith(LINE.format(numbers[0]))
    assert output.log.tail(1) == LINE.format(40_099).rstrip()
    os.close(writer)
    output.close()


def test_long_output_is_read_in_whole_lines(tmp_path: Path) -> None:
    log = tmp_path / "rank-0.log"
    written = [f"line {number:06} — é" for number in range(200_000)]
    log.write_text("\n".join(written) + "\nincomplete", encoding="utf-8")
    read, end = list[str](), 0
    while (piece := logs.output_since(str(log), end)).text:
        assert piece.text.endswith("\n")
        read += piece.text.splitlines()
        end = piece.end
    assert read == written
    assert end > 2 * logs.PIECE


def test_the_last_thousand_runs_are_known() -> None:
    spans = logs.Spans()
    for run in range(1, 1501):
        spans.begin(run, 10 * run, cell=run)
        spans.end(10 * run + 5)
    assert spans.known_runs() == tuple((run, run) for run in range(501, 1501))
    assert (spans.find(500), spans.find(501), spans.find(1500)) == (
        None,
        (5010, 5015),
        (15_000, 15_005),
    )
