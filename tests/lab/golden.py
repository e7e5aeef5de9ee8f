"""Texts that tests compare with a file, a section for each: messages of pure functions, and lines that a pool has shown.

A test takes the fixture `golden` and calls it with a text, ``golden.line`` with a text and a fact that one of its lines has, or uses
``golden.raises`` around what raises. ``make golden`` writes the files below `tests/golden/tests` again, and a message that was reworded is a
difference to review there, not an assertion to edit. Tests of the tiers `quick` and `near` take it; what needs an sshd or a cluster reads
codes and fields, so that ``make golden`` runs everywhere.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import pytest

from skymagic.errors import SkyError

TESTS = Path(__file__).resolve().parents[1]
FOLDER = TESTS / "golden" / "tests"
Kind = TypeVar("Kind", bound=BaseException)
TITLE = re.compile(r"^== (.*)\n", re.MULTILINE)


def path_of(test_file: Path) -> Path:
    """The golden file of a test file."""
    return FOLDER / test_file.relative_to(TESTS).with_suffix(".txt")


def read(path: Path) -> dict[str, str]:
    """The sections of a golden file."""
    parts = TITLE.split(path.read_text())[1:] if path.exists() else []
    return {
        title: textwrap.dedent(text).removesuffix("\n")
        for title, text in zip(parts[::2], parts[1::2], strict=True)
    }


def written(sections: Mapping[str, str]) -> str:
    """The text of a golden file; what is indented is no title."""
    return "".join(
        f"== {title}\n{textwrap.indent(text, '    ', lambda line: True)}\n"
        for title, text in sections.items()
    )


class Golden:
    """The texts of a test, in the order in which it shows them.

    Args:
        title: the test, with its parameters.
        expected: the sections of its file; None where they are being written.
        hidden: what differs between runs, and what stands for it.
    """

    def __init__(
        self, title: str, expected: Mapping[str, str] | None, hidden: Mapping[str, str]
    ) -> None:
        self.sections = dict[str, str]()
        self._title, self._expected, self._hidden = title, expected, hidden

    def __call__(self, *shown: object, hide: Sequence[str | Path] = ()) -> None:
        """Compare a text, or several as lines of one.

        Args:
            hide: what differs between runs and becomes "…": paths, and patterns of numbers or times.
        """
        lines = [line for each in shown for line in (each if _is_lines(each) else [each])]  # type: ignore[attr-defined]
        text = "\n".join(map(str, lines))
        for value, name in self._hidden.items():
            text = text.replace(value, name)
        for variable in hide:
            pattern = re.escape(str(variable)) if isinstance(variable, Path) else variable
            text = re.sub(pattern, "…", text)
        title = f"{self._title} #{len(self.sections) + 1}"
        self.sections[title] = text
        if self._expected is not None:
            assert text == self._expected.get(title), (
                f"{title}: run `make golden`, and read the difference"
            )

    def line(self, shown: str, *facts: str, hide: Sequence[str | Path] = ()) -> None:
        """Compare the line of a text that has all the facts: names, numbers, commands.

        A line that is repeated counts once. If several lines have them, all are compared.
        """
        found = [line.strip() for line in shown.splitlines() if all(fact in line for fact in facts)]
        assert found, f"no line has {facts}: {shown}"
        self([*dict.fromkeys(found)], hide=hide)

    @contextmanager
    def raises(
        self,
        kind: type[Kind] | tuple[type[Kind], ...],
        hide: Sequence[str | Path] = (),
    ) -> Iterator[pytest.ExceptionInfo[Kind]]:
        """Expect an error, and compare its message and its code."""
        with pytest.raises(kind) as failed:
            yield failed
        error = failed.value
        code = f" ({error.code})" if isinstance(error, SkyError) else ""
        self(f"{type(error).__name__}{code}: {error}", hide=hide)


def _is_lines(shown: object) -> bool:
    return isinstance(shown, list | tuple)
