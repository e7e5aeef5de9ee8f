"""The mutations that promises and contracts must find still apply to the package."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.mutations import MUTATIONS, Mutation

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_mutation_applies_once_and_compiles(mutation: Mutation) -> None:
    original = (ROOT / "skymagic" / mutation.file).read_text()
    assert mutation.mutated(original) != original


def test_mutations_name_existing_tests_and_all_folders() -> None:
    folders = ROOT / "tests" / "promises", ROOT / "tests" / "contracts"
    stems = {path.stem for folder in folders for path in folder.glob("test_*.py")}
    assert {stem for mutation in MUTATIONS for stem in mutation.first} <= stems
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS) >= 40
