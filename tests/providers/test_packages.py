"""Nodes get what the notebook has: packages that a cell needs are there before anything of it is sent."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.lab.distributions import Shelf, own_environments
from tests.lab.hosts import Host, Hosts, loopback
from tests.lab.notebook import Notebook, Shown, opened, seen
from tests.lab.shells import bootstrapped_home

__all__ = ["bootstrapped_home"]
pytestmark = pytest.mark.needs("sshd")


@pytest.fixture(scope="module")
def lab(
    tmp_path_factory: pytest.TempPathFactory, bootstrapped_home: Path
) -> Iterator[tuple[Hosts, Notebook, Shelf]]:
    """Two hosts with an environment of their own each, and a notebook that has packages which they lack."""
    folder = tmp_path_factory.mktemp("packages")
    shelf = Shelf(folder / "shelf")
    shelf.add(
        "tiny-data", "1.2", {"tinydata.py": "class Frame:\n    def __init__(self, n): self.n = n\n"}
    )
    shelf.add("tiny-data", "1.3", {"tinydata.py": "newer = True\n"}, here=False)
    shelf.add("tiny-models", "2.0", {"tinymodels/__init__.py": "def fit(): return 'fitted'\n"})
    shelf.add("tiny-optional", "3.0", {"tinyoptional.py": ""})
    shelf.add("tiny-plots", "0.1", {"tinyplots.py": ""}, here=False)
    shelf.add("tiny-space-one", "1.0", {"tinyspace/one/__init__.py": "number = 1\n"})
    shelf.add("tiny-space-two", "1.0", {"tinyspace/two/__init__.py": "number = 2\n"})
    with loopback(folder / "hosts", 2, env=shelf.of_hosts, names=("gpu1", "gpu2")) as hosts:
        for host in hosts:
            own_environments(host.home, bootstrapped_home)
        (folder / "client/.ssh").mkdir(parents=True)
        shutil.copy(hosts.config, folder / "client/.ssh/config")
        (folder / "notebook").mkdir()
        env = {"HOME": str(folder / "client"), **shelf.of_notebook}
        with opened(
            folder / "notebook", "%sky_pool lab --provider ssh --hosts gpu[1-2]", env=env
        ) as notebook:
            yield hosts, notebook, shelf


def there(host: Host, name: str) -> bool:
    """Whether a distribution is in a host's environment."""
    return any(host.home.glob(f".skymagic/env/*/lib/python*/site-packages/{name}-*.dist-info"))


def said(shown: Shown) -> str:
    """All that a cell shows, in order of kind."""
    return shown.text + "".join(data.get("text/plain", "") for data in shown.rich)


def test_a_value_brings_its_package_along(lab: tuple[Hosts, Notebook, Shelf]) -> None:
    hosts, notebook, _ = lab
    notebook.run("import tinydata\nframe = tinydata.Frame(3)")
    shown = notebook.run("%%sky_broadcast -o seen\nframe.n, type(frame).__module__")
    assert notebook.value("seen") == [(3, "tinydata")] * 2
    assert re.search(r"installing tiny_data 1\.2 on gpu1, gpu2 … \d+\.\d s", said(shown))
    assert all(there(host, "tiny_data") for host in hosts)
    again = notebook.run("%%sky_broadcast -o seen\nframe.n")
    assert "installing" not in said(again)


def test_arrays_bring_numpy_along(lab: tuple[Hosts, Notebook, Shelf]) -> None:
    """The cell names no module; its values require the package."""
    hosts, notebook, _ = lab
    assert not any(there(host, "numpy") for host in hosts)
    notebook.run("import numpy as np\nbig, small = np.arange(300_000), {'a': np.float32(1.5)}")
    shown = notebook.run("%%sky_broadcast -o seen\nint(big[-1]), float(small['a'])")
    assert notebook.value("seen") == [(299_999, 1.5)] * 2
    assert f"installing numpy {version('numpy')} on gpu1, gpu2" in said(shown)


def test_local_module_installs_its_imports(
    lab: tuple[Hosts, Notebook, Shelf],
) -> None:
    """Except optional imports, and imports inside its functions."""
    hosts, notebook, _ = lab
    (notebook.folder / "helper.py").write_text(
        "from tinymodels import fit\n"
        "try:\n    import tinyoptional\nexcept ImportError:\n    tinyoptional = None\n"
        "def later():\n    import tinyspace.two\n"
    )
    shown = notebook.run(
        "%%sky_broadcast -o seen\nimport helper\nhelper.fit(), helper.tinyoptional"
    )
    assert notebook.value("seen") == [("fitted", None)] * 2
    assert "installing tiny_models 2.0 on gpu1, gpu2" in said(shown)
    assert not any(there(host, name) for host in hosts for name in ("tiny_optional", "tiny_space"))


def test_function_installs_imports_of_its_body(
    lab: tuple[Hosts, Notebook, Shelf],
) -> None:
    """Only the needed part of a namespace package."""
    hosts, notebook, _ = lab
    notebook.run("def one():\n    from tinyspace.one import number\n    return number")
    assert seen(notebook, "one()") == [1, 1]
    assert all(there(host, "tiny_space_one") for host in hosts)
    assert not any(there(host, "tiny_space_two") for host in hosts)


def test_imports_in_a_try_install_nothing(lab: tuple[Hosts, Notebook, Shelf]) -> None:
    hosts, notebook, _ = lab
    notebook.run(
        "%%sky_broadcast -o seen\ntry:\n    import tinyoptional\n    got = True\nexcept ImportError:\n    got = False\ngot"
    )
    assert notebook.value("seen") == [False, False]
    assert not any(there(host, "tiny_optional") for host in hosts)


def test_ask_mode_prints_the_command(lab: tuple[Hosts, Notebook, Shelf]) -> None:
    hosts, notebook, _ = lab
    notebook.run("sent = 'sent'")
    notebook.run("%config SkyMagic.packages = 'ask'")
    failed = notebook.fail("%%sky_broadcast\nimport tinyspace.two\nsent")
    assert failed.ename == "PackagesError"
    assert "%sky_pip install tiny_space_two==1.0" in failed.text
    notebook.run("%config SkyMagic.packages = 'off'")
    assert notebook.fail("%%sky_broadcast --no-push\nsent").ename == "NameError"  # nothing was sent
    assert notebook.fail("%%sky_broadcast\nimport tinyspace.two").ename == "ModuleNotFoundError"
    assert not any(there(host, "tiny_space_two") for host in hosts)
    notebook.run("%config SkyMagic.packages = 'sync'")
    assert seen(notebook, "import tinyspace.two\ntinyspace.two.number") == [2, 2]


def test_packages_are_installed_by_hand_and_seen_at_once(
    lab: tuple[Hosts, Notebook, Shelf],
) -> None:
    hosts, notebook, _ = lab
    failed = notebook.fail("%%sky_broadcast\nimport tinyplots")
    assert failed.ename == "ModuleNotFoundError"
    assert "%sky_pip install tinyplots" in failed.text
    shown = notebook.run("%sky_pip install tiny_plots")
    assert re.search(r"^\[gpu1\] .*tiny[-_]plots[-=]+0\.1", shown.text, re.MULTILINE), shown.text
    assert "[gpu2] " in shown.text
    assert seen(notebook, "import tinyplots\ntinyplots.__name__") == ["tinyplots"] * 2
    table = notebook.run("%sky_pip list").text
    assert re.search(r"^package +gpu1, gpu2 +notebook$", table, re.MULTILINE)
    assert re.search(r"^tiny-plots +0\.1 +-$", table, re.MULTILINE)


def test_a_version_that_is_imported_already_needs_a_restart(
    lab: tuple[Hosts, Notebook, Shelf],
) -> None:
    _, notebook, _ = lab
    notebook.run("import tinydata\nframe = tinydata.Frame(4)")
    notebook.run("%%sky_broadcast\nframe")
    shown = notebook.run("%sky_pip install tiny_data==1.3")
    assert re.search(r"\btiny-data 1\.2 .*: 1\.3 .*%sky_restart", shown.text)
    notebook.run("%sky_restart")
    shown = notebook.run("%%sky_broadcast -o seen\nimport tinydata\ntinydata.newer")
    assert notebook.value("seen") == [True, True]
    assert "tiny_data is 1.2 here and 1.3 on gpu1, gpu2" in said(shown)


def test_unavailable_package_is_reported(lab: tuple[Hosts, Notebook, Shelf]) -> None:
    _, notebook, shelf = lab
    shelf.add("tiny-private", "1.0", {"tinyprivate.py": ""})
    for wheel in shelf.links.glob("tiny_private*"):
        wheel.unlink()
    failed = notebook.fail("%%sky_broadcast\nimport tinyprivate", "packages-missing")
    assert all(
        word in failed.text for word in ("tiny_private", "gpu1", "gpu2", "No solution found")
    )
    failed = notebook.fail("%sky_pip install no_such_thing_anywhere")
    assert "no_such_thing_anywhere" in failed.text.replace("-", "_")


def test_an_interpreter_of_the_users_own_is_left_alone(lab: tuple[Hosts, Notebook, Shelf]) -> None:
    hosts, notebook, shelf = lab
    shelf.add("tiny-late", "1.0", {"tinylate.py": ""})
    notebook.run(f"%sky_pool own --provider ssh --hosts gpu1 --python {sys.executable}")
    failed = notebook.fail("%%sky_broadcast --pool own\nimport tinylate")
    assert failed.ename == "PackagesError"
    assert f"{sys.executable} -m pip install tiny_late==1.0" in failed.text
    failed = notebook.fail("%sky_pip install tiny_late --pool own")
    assert f"{sys.executable} -m pip install tiny_late" in failed.text
    notebook.run("%sky_down own")


def test_folder_distributions_use_no_index(lab: tuple[Hosts, Notebook, Shelf]) -> None:
    """An index may have another project of this name. The notebook packs the distribution; if it cannot, the user installs it."""
    hosts, notebook, shelf = lab
    shelf.add("tiny-own", "1.0", {"tinyown.py": "mine = True\n"})
    shelf.add("tiny-lost", "1.0", {"tinylost.py": "mine = True\n"})
    for name, editable in (("tiny_own", "false"), ("tiny_lost", "true")):
        (shelf.site / f"{name}-1.0.dist-info/direct_url.json").write_text(
            f'{{"url": "file:///src", "dir_info": {{"editable": {editable}}}}}'
        )
    (shelf.links / "tiny_own-1.0-py3-none-any.whl").write_bytes(b"another")
    shown = notebook.run("%%sky_broadcast --pool lab -o seen\nimport tinyown\ntinyown.mine")
    assert notebook.value("seen") == [True, True]
    assert "installing tiny-own 1.0 on gpu1, gpu2" in said(shown)
    failed = notebook.fail("%%sky_broadcast --pool lab\nimport tinylost", "no-wheel")
    assert re.search(r"\btiny_lost 1\.0 .* /src, ", failed.text)
    assert not any(there(host, "tiny_lost") for host in hosts)
    notebook.run(f"%sky_pip install {shelf.links}/tiny_lost-1.0-py3-none-any.whl --pool lab")
    notebook.run("%%sky_broadcast --pool lab -o seen\nimport tinylost\ntinylost.mine")
    assert notebook.value("seen") == [True, True]
    assert "none.whl" in notebook.fail("%sky_pip install ./none.whl --pool lab").text


def test_a_pool_of_this_machine_has_the_notebooks_packages(
    lab: tuple[Hosts, Notebook, Shelf],
) -> None:
    _, notebook, _ = lab
    notebook.run("%sky_pool here --ranks 1")
    assert "%pip install tiny_late" in notebook.fail("%sky_pip install tiny_late --pool here").text
    assert (
        "%pip install tinyplots"
        in notebook.fail("%%sky_broadcast --pool here\nimport tinyplots").text
    )
    notebook.run("%sky_down here")


def test_unknown_packages_of_a_node_do_not_count_as_present(
    lab: tuple[Hosts, Notebook, Shelf],
) -> None:
    _, notebook, _ = lab
    notebook.run(
        "import skymagic.pool.packages as p; before, p.ANSWER_TIMEOUT = p.ANSWER_TIMEOUT, 1.0"
    )
    notebook.run("pool = %sky_pool lab --provider ssh --hosts gpu[1-2]")
    notebook.run("known = pool.pool.packages; known._nodes.clear(); known._settled.clear()")
    os.mkfifo(gate := notebook.folder / "gate")
    held = f"print('there')\nctypes.PyDLL(None).open({os.fsencode(gate)!r}, 0)\nprint('done')"
    cell = notebook.run(f"%%sky_broadcast -a -t 1 --only all\nimport ctypes\n{held}")
    notebook.watch(cell, lambda shown: "there" in shown.stdout)
    failed = notebook.fail("%%sky_broadcast -t 0\nimport tinydata", "packages-unknown")
    assert notebook.fields()["names"] == ("gpu2",)
    gate.write_text("go")
    notebook.watch(cell, lambda shown: "done" in shown.said)
    assert re.match(r"gpu2 .*\b2 s\b", failed.evalue)
    notebook.run("p.ANSWER_TIMEOUT = before")
    notebook.run("%%sky_broadcast -t 0\nimport tinydata")
