"""Golden files are current, and an error's code and fields survive where it travels."""

from __future__ import annotations

import pickle
import re
from pathlib import Path

import pytest

from skymagic.errors import CODES, SkyError
from tests.surfaces import FIELDS, FOLDER, SURFACES, error_classes, samples

PACKAGE = Path(__file__).resolve().parents[1] / "skymagic"


@pytest.mark.parametrize("name", SURFACES)
def test_a_golden_file_is_current(name: str) -> None:
    assert (FOLDER / name).read_text() == SURFACES[name](), "run `make golden`, read `git diff`"


def test_every_code_is_documented_and_used() -> None:
    texts = [path.read_text() for path in PACKAGE.rglob("*.py")]
    given = {code for text in texts for code in re.findall(r'\bcode="([a-z-]+)"', text)}
    assert {kind.code for kind in error_classes()} | given == set(CODES)


@pytest.mark.parametrize(
    "error", samples(), ids=lambda error: f"{type(error).__name__}-{error.code}"
)
def test_code_and_fields_survive_a_pickle(error: SkyError) -> None:
    copied = pickle.loads(pickle.dumps(error))
    assert type(copied) is type(error)
    assert str(copied) == str(error)
    assert [getattr(copied, name) for name in FIELDS] == [getattr(error, name) for name in FIELDS]
