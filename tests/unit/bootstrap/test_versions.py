"""A node gets the notebook's versions: names are pinned, what they need is preferred, and builds are left to the node."""

from __future__ import annotations

from importlib.metadata import version

import pytest

from skymagic.bootstrap.requirements import InstalledDistribution, notebook, pinned, preferred

HERE = {
    each.name.lower(): each
    for each in (
        InstalledDistribution("torch", "2.13.0+cpu", ("filelock", "numpy; extra == 'opt'", "nvidia-nccl-cu13; sys_platform == 'win9'")),
        InstalledDistribution("filelock", "3.20.0"),
        InstalledDistribution("numpy", "2.4.6"),
        InstalledDistribution("pandas", "3.0.1", ("numpy>=1.26", "torch[opt]; extra == 'all'")),
        InstalledDistribution("mine", "0.1.dev0", ("filelock",), own=True),
        InstalledDistribution("broken", "1.0", ("not a requirement !!", "numpy @ https://example.org/numpy.whl", "broken")),
    )
}  # fmt: skip


@pytest.mark.parametrize(
    ("asked", "given"),
    [
        ("torch", "torch==2.13.0"),
        ("Torch[opt]", "Torch[opt]==2.13.0"),
        ('torch; python_version >= "3"', 'torch==2.13.0; python_version >= "3"'),
        ("torch>=2.3", "torch>=2.3"),
        ("torch==2.99", "torch==2.99"),
        ("torch>=0", "torch>=0"),
        ("elsewhere", "elsewhere"),
        ("mine", "mine"),
        ("./wheels/x-1.0-py3-none-any.whl", "./wheels/x-1.0-py3-none-any.whl"),
        ("torch @ https://example.org/t.whl", "torch @ https://example.org/t.whl"),
    ],
)
def test_a_name_without_a_version_gets_the_notebooks(asked: str, given: str) -> None:
    assert pinned([asked], HERE.get) == (given,)


@pytest.mark.parametrize(
    ("asked", "given"),
    [
        ((), ()),
        (("pandas",), ("numpy==2.4.6", "pandas==3.0.1")),
        (
            ("pandas>=2", "torch"),
            ("filelock==3.20.0", "numpy==2.4.6", "pandas==3.0.1", "torch==2.13.0"),
        ),
        (
            ("pandas[all]", "torch"),
            ("filelock==3.20.0", "numpy==2.4.6", "pandas==3.0.1", "torch==2.13.0"),
        ),
        (("torch[opt]",), ("filelock==3.20.0", "numpy==2.4.6", "torch==2.13.0")),
        (("torch>=0",), ("filelock==3.20.0",)),
        (("torch>=0", "pandas[all]"), ("filelock==3.20.0", "numpy==2.4.6", "pandas==3.0.1")),
        (("mine",), ("filelock==3.20.0",)),
        (("elsewhere", "./x.whl"), ()),
        (("broken",), ("broken==1.0",)),
    ],
)
def test_dependencies_prefer_the_notebooks_versions(
    asked: tuple[str, ...], given: tuple[str, ...]
) -> None:
    assert preferred(asked, HERE.get) == given


def test_this_notebooks_own_distributions() -> None:
    assert pinned(["IPython", "no-such-thing"]) == (
        f"IPython=={version('ipython')}",
        "no-such-thing",
    )
    found = preferred(["ipykernel"])
    for name in ("ipykernel", "ipython", "jupyter-client", "traitlets"):
        assert f"{name}=={version(name)}" in found


def test_missing_files_and_folders_are_refused() -> None:
    assert notebook("no-such-thing") is None
    assert notebook("") is None
