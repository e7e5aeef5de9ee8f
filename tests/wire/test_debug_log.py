"""Debug logs: one private, bounded file per process, whatever user code does to logging."""

from __future__ import annotations

import logging
import logging.config
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from skymagic.wire import debug_entries, debug_log
from skymagic.wire.debug_log import DebugFile

logger = logging.getLogger("skymagic.wire.test")
IDENTIFIERS = {"pool": "main", "node": 1}


@pytest.fixture(autouse=True)
def unchanged_logging() -> Iterator[None]:
    """Restore what a test changes in this process."""
    before, manager = debug_log.level(), logger.manager
    yield
    debug_log.set_level(before)
    logging.disable(logging.NOTSET)
    for other in logging.Logger.manager.loggerDict.values():
        if isinstance(other, logging.Logger):
            other.disabled = False  # by `disable_existing_loggers`
    logger.manager, logger.disabled = manager, False


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """File of this process, which is written."""
    path = tmp_path / debug_log.file_name(1, "agent")
    debug_log.setup(path, IDENTIFIERS)
    debug_log.set_level("DEBUG")
    return path


def texts(path: Path) -> list[str]:
    return [entry.text for entry in debug_entries.read(path, "agent")]


def test_nothing_is_written_or_shown_by_default(capfd: pytest.CaptureFixture[str]) -> None:
    code = (
        "import skymagic, logging\n"
        "logging.basicConfig(level=logging.DEBUG)\n"
        "logging.getLogger('skymagic.pool').warning('seen')\n"
        "assert not logging.getLogger('skymagic.pool').isEnabledFor(logging.INFO)\n"
        "logging.getLogger('mine').info('of the user')"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert capfd.readouterr() == ("", "INFO:mine:of the user\n")


def test_line_has_time_module_and_identifiers(path: Path) -> None:
    logger.info("rank forked: rank=%s", 3)
    (text,) = texts(path)
    assert debug_entries.START.match(text)
    assert text[28:] == "INFO wire.test: rank forked: rank=3 pool=main node=1"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_levels(path: Path) -> None:
    for level in debug_log.LEVELS:
        debug_log.set_level(level)
        logger.debug("debug at %s", level)
        logger.warning("warning at %s", level)
    kinds = [text[28:].split(" pool=")[0].split(": ")[1] for text in texts(path)]
    expected = "debug at DEBUG, warning at DEBUG, warning at INFO, warning at WARNING"
    assert ", ".join(kinds) == expected
    with pytest.raises(ValueError, match="LOUD"):
        debug_log.set_level("LOUD")


def test_size_is_bounded(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(debug_log, "MAX_BYTES", 2000)
    for number in range(100):
        logger.info("number %s", number)
    files = sorted(path.parent.iterdir())
    assert files == [path, path.with_name(f"{path.name}{debug_log.OLDER}")]
    assert all(file.stat().st_size <= 2000 for file in files)
    numbers = [int(text.split("number ")[1].split()[0]) for text in texts(path)]
    assert numbers == list(range(numbers[0], 100))
    assert len(numbers) > 20


def test_user_configuration_does_not_stop_the_log(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logging.disable(logging.CRITICAL)
    logging.config.dictConfig({"version": 1, "disable_existing_loggers": True})
    monkeypatch.setattr(logging.getLogger("skymagic"), "handlers", [])
    debug_log.protect()
    logger.info("still written")
    assert "still written" in texts(path)[0]


def test_unwritable_line_disturbs_nothing(path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    malformed = logging.LogRecord("skymagic.a", 20, "", 0, "%s %s", ("one argument",), None)
    DebugFile(path, {}).emit(malformed)
    path.mkdir()
    logger.info("the path is a folder")
    assert capfd.readouterr() == ("", "")


def test_entries_of_processes_are_merged_by_time(tmp_path: Path) -> None:
    files = {name: tmp_path / f"{name}.log" for name in ("agent", "rank-0")}
    handlers = {name: DebugFile(path, {"node": 0}) for name, path in files.items()}
    for number in range(6):
        record = logging.LogRecord("skymagic.a", 20, "", 0, "n=%s\nmore", (number,), None)
        record.created = 1_800_000_000 + number / 1000
        handlers["agent" if number % 2 else "rank-0"].emit(record)
    sources = [debug_entries.read(path, name) for name, path in files.items()]
    entries = debug_entries.last(sources, 3, r"n=[0-4]")
    assert [(entry.process, entry.text[-19:]) for entry in entries] == [
        (name, f"n={number} node=0\n    more")
        for number, name in ((2, "rank-0"), (3, "agent"), (4, "rank-0"))
    ]


def test_text_of_an_error_cannot_forge_an_entry(path: Path) -> None:
    forged = "2026-01-01T00:00:00.000000Z INFO pool: forged"
    logger.warning("failed: %s", f"reason\n{forged}")
    (text,) = texts(path)
    assert text.splitlines()[1] == f"    {forged}"


@pytest.mark.parametrize(
    ("value", "level"), [("", ""), ("info", "INFO"), ("DEBUG", "DEBUG"), ("1", "DEBUG")]
)
def test_level_of_the_environment(value: str, level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(debug_log.ENVIRONMENT, value)
    assert debug_log.level_of_environment() == level


def test_child_process_logs_beside_the_notebook(path: Path) -> None:
    notebook_path = path.with_name("notebook-host-12.log")
    debug_log.setup(notebook_path, {})
    arguments = debug_log.arguments_beside("ray")
    code = (
        "import sys, logging\n"
        "from skymagic.wire import debug_log\n"
        "debug_log.start(sys.argv[1:])\n"
        "logging.getLogger('skymagic.providers.ray_driver').info('connected')"
    )
    subprocess.run([sys.executable, "-c", code, *arguments], check=True)
    (text,) = texts(path.with_name("ray-host-12.log"))
    assert text.endswith(" INFO providers.ray_driver: connected")
    debug_log.set_level("")
    assert debug_log.arguments_beside("ray") == ()
