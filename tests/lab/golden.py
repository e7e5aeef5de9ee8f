"""Texts that quick tests compare with a file: the messages of pure functions, a section for each.

A test takes the fixture `golden` and calls it with a text, or ``golden.raises`` around what raises. ``make golden`` writes the files below
`tests/golden/tests` again, and a message that was reworded is a difference to review there, not an assertion to edit.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from skymagic.errors import SkyError

TESTS = Path(__file__).resolve().parents[1]
FOLDER = TESTS / "golden" / "tests"
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

    def __call__(self, *shown: object) -> None:
        """Compare a text, or several as lines of one."""
        lines = [line for each in shown for line in (each if _is_lines(each) else [each])]  # type: ignore[attr-defined]
        text = "\n".join(map(str, lines))
        for value, name in self._hidden.items():
            text = text.replace(value, name)
        title = f"{self._title} #{len(self.sections) + 1}"
        self.sections[title] = text
        if self._expected is not None:
            assert text == self._expected.get(title), (
                f"{title}: run `make golden`, and read the difference"
            )

    @contextmanager
    def raises(
        self, kind: type[BaseException] | tuple[type[BaseException], ...]
    ) -> Iterator[pytest.ExceptionInfo[BaseException]]:
        """Expect an error, and compare its message and its code."""
        with pytest.raises(kind) as failed:
            yield failed
        error = failed.value
        code = f" ({error.code})" if isinstance(error, SkyError) else ""
        self(f"{type(error).__name__}{code}: {error}")


def _is_lines(shown: object) -> bool:
    return isinstance(shown, list | tuple)
