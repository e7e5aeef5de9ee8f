"""Environments over an image hold only what the image lacks."""

from __future__ import annotations

from dataclasses import replace

from skymagic.bootstrap.facts import HostFacts, Python
from skymagic.bootstrap.install import install_script, plan_install
from skymagic.bootstrap.layers import kept_builds, layer_problems, missing_in_image
from skymagic.bootstrap.requirements import InstalledDistribution, Requirements
from tests.lab.golden import Golden

REQUIREMENTS = Requirements(
    "3.11",
    "3.11",
    ("torch", "ipykernel>=6.17.1", "pandas>=3", "https://example.org/x-1-py3-none-any.whl"),
    ("torch==2.13.0", "numpy==2.4.0", "pandas==3.0.1", "filelock==3.20.0", "pytz==2026.1"),
    base="pytorch/pytorch",
)
FACTS = HostFacts(
    "Linux",
    "x86_64",
    "h1",
    "/home/ann",
    "/home/ann/.skymagic",
    pythons=(Python("3.11", "/opt/conda/bin/python3"),),
    packages={"torch": "2.5.1+cu124", "ipykernel": "6.29.5", "pandas": "2.2.0", "numpy": "1.26.4"},
)

NOTEBOOK = {
    "pandas": InstalledDistribution("pandas", "2.9", ("numpy", "pytz")),
    "numpy": InstalledDistribution("numpy", "2.4.0"),
    "pytz": InstalledDistribution("pytz", "2026.1"),
}


def test_packages_of_the_image_are_not_installed_again() -> None:
    missing = missing_in_image(REQUIREMENTS, FACTS, NOTEBOOK.get)
    assert missing.packages == ("pandas>=3", "https://example.org/x-1-py3-none-any.whl")
    assert missing.preferences == ("pytz==2026.1",), "numpy is there, and only torch needs filelock"
    assert missing_in_image(replace(REQUIREMENTS, base=""), FACTS).packages[0] == "torch"


def test_build_of_torch_is_kept() -> None:
    missing = missing_in_image(REQUIREMENTS, FACTS)
    assert kept_builds(missing, FACTS) == ("torch==2.5.1+cu124",)
    other = missing_in_image(replace(REQUIREMENTS, packages=("torch>=2.13",)), FACTS)
    assert kept_builds(other, FACTS) == (), "the user wants another one"
    plan = plan_install(REQUIREMENTS, replace(FACTS, env="e"), "drop", "")
    assert plan.python == "/opt/conda/bin/python3"
    assert "torch==2.5.1+cu124" in install_script(plan, FACTS)


def test_environments_of_images_have_names_of_their_own() -> None:
    keys = {replace(REQUIREMENTS, base=base).key for base in ("", "a/b", "a/c")}
    assert len(keys) == 3


def test_unusable_images_are_refused(golden: Golden) -> None:
    facts = [
        replace(FACTS, pythons=()),
        replace(FACTS, pythons=(Python("3.9", "/usr/bin/python3"),)),
    ]
    golden("\n".join(text for each in facts for text in layer_problems(each, REQUIREMENTS)))
    assert layer_problems(FACTS, REQUIREMENTS) == []
