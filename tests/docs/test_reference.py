"""The reference is that of the package: generated pages are current, and each class of errors has its anchor."""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import re
import shlex
from types import ModuleType

import pytest

from skymagic import errors
from skymagic.api.command import _parser
from skymagic.magics.arguments.parsing import ParsedLine
from tests.lab.notebook import ROOT

DOCS = ROOT / "docs"


def generator() -> ModuleType:
    """docs/generate.py, which is no module of a package."""
    spec = importlib.util.spec_from_file_location("docs_generate", DOCS / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PAGES = generator().PAGES


@pytest.mark.parametrize("name", PAGES)
def test_a_generated_page_is_current(name: str) -> None:
    assert (DOCS / "reference" / name).read_text() == PAGES[name](), "run `python docs/generate.py`"


def test_each_error_has_an_anchor() -> None:
    text = (DOCS / "reference" / "errors.md").read_text()
    classes = {
        name.lower()
        for name, value in inspect.getmembers(errors, inspect.isclass)
        if issubclass(value, errors.SkyError) and not name.startswith("_")
    }
    assert set(re.findall(r"^\((\w+)\)=$", text, re.MULTILINE)) == classes


def test_links_lead_to_existing_files() -> None:
    pages = [*ROOT.glob("*.md"), *DOCS.rglob("*.md"), ROOT / "benchmarks" / "README.md"]
    missing = [
        f"{page.relative_to(ROOT)}: {target}"
        for page in pages
        if "_build" not in page.parts
        for target in re.findall(r"\]\((?!https?:|#|mailto:)([^)#\s]+)", page.read_text())
        if not (page.parent / target).exists()
    ]
    assert missing == []


def test_every_command_prints_json() -> None:
    (commands,) = [
        action for action in _parser()._actions if isinstance(action, argparse._SubParsersAction)
    ]
    without = [
        name for name, one in commands.choices.items() if "--json" not in one._option_string_actions
    ]
    assert without == ["mcp"], "it speaks JSON with its client"


def test_commands_in_the_agent_skill_are_valid() -> None:
    """Commands in its table parse without their optional parts, and its magics are accepted unchanged."""
    text = (ROOT / "skills" / "skymagic" / "SKILL.md").read_text()
    lines = re.findall(r"^\| `skymagic ([^`]+)` \|", text, re.MULTILINE)
    assert len(lines) == 11
    for line in lines:
        assert _parser().parse_args(shlex.split(re.sub(r"\[.*?\]", "", line))).json
    magics = re.findall(r"^%%?(sky_\w+) ?(.*)$", text, re.MULTILINE)
    assert {name for name, _ in magics} == {"sky_pool", "sky_broadcast"}
    for name, line in magics:
        ParsedLine(name, line).raise_mistakes()
