"""Golden files are current, and an error's code and fields survive where it travels."""

from __future__ import annotations

import ast
import pickle
import re
from pathlib import Path

import pytest

from skymagic.errors import CODES, SkyError
from tests import prose
from tests.surfaces import FIELDS, FOLDER, SURFACES, error_classes, samples

MOST_PROSE = 58
"""Sentences of the package that tests repeat, at most: lower it with their number. Read code and fields, or take the fixture `golden`."""
PACKAGE = Path(__file__).resolve().parents[1] / "skymagic"


@pytest.mark.parametrize("name", SURFACES)
def test_a_golden_file_is_current(name: str) -> None:
    assert (FOLDER / name).read_text() == SURFACES[name](), "run `make golden`, read `git diff`"


def test_every_code_is_documented_and_used() -> None:
    texts = [path.read_text() for path in PACKAGE.rglob("*.py")]
    assigned = r'\bcode="([a-z-]+)"(?! in )'
    given = {code for text in texts for code in re.findall(assigned, text)}
    assert {kind.code for kind in error_classes()} | given == set(CODES)


@pytest.mark.parametrize(
    "error", samples(), ids=lambda error: f"{type(error).__name__}-{error.code}"
)
def test_code_and_fields_survive_a_pickle(error: SkyError) -> None:
    copied = pickle.loads(pickle.dumps(error))
    assert type(copied) is type(error)
    assert str(copied) == str(error)
    assert [getattr(copied, name) for name in FIELDS] == [getattr(error, name) for name in FIELDS]


def test_tests_repeat_fewer_and_fewer_sentences() -> None:
    found = prose.assertions()
    assert sum(map(len, found.values())) <= MOST_PROSE, "python -m tests.prose lists them"


def test_message_is_counted_once_where_it_is_compared() -> None:
    package = prose.in_a_row("blue frogs sing loudly: hear them; for frogs in")
    test = """
told = "blue frogs sing loudly"
assert "blue frogs sing loudly" in told
assert told == ["blue frogs sing", "frogs loudly"]
with raises(E, match=r"frogs sing loudly"): pass
assert told.startswith("frog 1 sings loudly")
assert notebook.value("[frogs.sing for frogs in sing.loudly]") == 1
"""
    strings = [text for _, text in prose.compared(ast.parse(test))]
    quoting = [text for text in strings if prose.quotes(text, package)]
    assert quoting == ["blue frogs sing loudly", "blue frogs sing", "frogs sing loudly"]
