"""The table of plugins: found by name, made from options, ordered, and extended by other packages."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import pytest

import skymagic as sky
from skymagic import plugins
from skymagic.errors import RequestError
from skymagic.magics.arguments.help import CompletionNames, complete
from skymagic.plan.accelerators import Accelerator
from skymagic.plan.image import Image
from skymagic.plan.requests import PluginSpec, PoolRequest
from skymagic.plugins import Cluster, Plugin
from skymagic.pool.launch import plan_of
from skymagic.runtime.info import InstanceInfo
from tests.lab.golden import Golden

OURS = {"torch", "jax", "keras", "huggingface", "accelerate", "joblib", "sklearn"}

THIRD_PARTY = """
from __future__ import annotations
from skymagic.plugins import Plugin

def tracker(project: str, steps: int = 10, rate: float | None = None, offline: bool = False) -> Plugin:
    shown = f"{project!r} {steps!r} {rate!r} {offline!r}"
    return Plugin(name="whatever", bootstrap=lambda cluster: [shown])

def wrong():
    return 3

def fragile():
    raise RuntimeError("no licence")
"""


@pytest.fixture
def third_party(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An installed package with one good plugin and several broken ones."""
    (tmp_path / "skymagic_thirdparty.py").write_text(THIRD_PARTY)
    metadata = tmp_path / "skymagic_thirdparty-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: skymagic-thirdparty\nVersion: 1.0\n"
    )
    (metadata / "entry_points.txt").write_text(
        "[skymagic.plugins]\n"
        "tracker = skymagic_thirdparty:tracker\n"
        "wrong = skymagic_thirdparty:wrong\n"
        "fragile = skymagic_thirdparty:fragile\n"
        "gone = skymagic_thirdparty_that_is_gone:gone\n"
        "torch = skymagic_thirdparty:wrong\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("skymagic_thirdparty", None)


def mistakes_of(*specs: PluginSpec | Plugin) -> tuple[str, ...]:
    with pytest.raises(RequestError) as refused:
        plugins.resolve(specs)
    return refused.value.mistakes


# ------------------------------------------------------------------------------------------- finding


def test_our_plugins_are_in_the_table() -> None:
    assert set(plugins.TABLE) == OURS
    assert set(plugins.names()) >= OURS
    assert set(dir(sky.plugins)) >= OURS


def test_factory_stays_an_attribute_after_module_import() -> None:
    import skymagic.plugins._torch.plugin  # noqa: F401  # what could take the attribute's place

    made = sky.plugins.torch(backend="gloo")
    assert isinstance(made, Plugin)
    assert repr(made) == "Plugin('torch')"
    from skymagic.plugins import torch

    assert callable(torch)


def test_asking_for_a_plugin_loads_no_framework() -> None:
    code = "import sys, skymagic as sky; sky.plugins.torch(); dir(sky.plugins); print('torch' in sys.modules)"
    root = Path(plugins.__file__).parent.parent.parent
    child = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=root
    )
    assert child.stdout.strip() == "False"


def test_unknown_plugins_name_the_nearest(golden: Golden) -> None:
    golden(mistakes_of(PluginSpec("torhc")))
    assert "available: accelerate, huggingface, jax" in mistakes_of(PluginSpec("zzzz"))[0]
    with golden.raises(AttributeError):
        _ = sky.plugins.torhc


# ------------------------------------------------------------------------------------------- options


def test_options_are_remembered_for_the_ranks_and_never_shown() -> None:
    made = sky.plugins.torch("gloo", version="2.3.0")
    assert made.spec == PluginSpec("torch", {"backend": "gloo", "version": "2.3.0"})
    assert made.spec is not None
    assert plugins.load(made.spec).spec == made.spec
    assert "gloo" not in repr(made)


def test_all_mistakes_at_once(golden: Golden) -> None:
    found = mistakes_of(PluginSpec("torch", {"bakend": "gloo", "zz": "1"}), PluginSpec("torhc"))
    golden(found)


def test_python_callers_get_a_type_error() -> None:
    with pytest.raises(TypeError, match="bakend"):
        sky.plugins.torch(bakend="gloo")


# ----------------------------------------------------------------------------------- other packages


@pytest.mark.usefixtures("third_party")
def test_entry_points_are_added_without_running_their_code(golden: Golden) -> None:
    """They may lie beside a notebook that somebody else made."""
    assert set(plugins.names()) == OURS | {"tracker", "wrong", "fragile", "gone"}
    assert "tracker" in dir(sky.plugins)
    completed = CompletionNames(plugins=tuple(plugins.names()), plugin_options=plugins.options)
    assert complete("sky_pool", "--plugin tra", completed) == ["tracker"]
    assert complete("sky_pool", "--plugin tracker:pro", completed) == []
    golden(mistakes_of(PluginSpec("trackr"))[0])
    assert "skymagic_thirdparty" not in sys.modules


@pytest.mark.usefixtures("third_party")
def test_options_of_an_imported_plugin_complete() -> None:
    plugins.load(PluginSpec("tracker", {"project": "a"}))
    completed = CompletionNames(plugins=tuple(plugins.names()), plugin_options=plugins.options)
    assert complete("sky_pool", "--plugin tracker:pro", completed) == ["tracker:project="]


@pytest.mark.skipif(find_spec("joblib") is None, reason="joblib is not installed")
def test_plan_imports_only_packages_of_its_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them took half a second at the start of each pool."""
    read: list[str] = []
    plain = metadata.PathDistribution.read_text

    def told(self: metadata.PathDistribution, name: str) -> str | None:
        read.append(str(self._path))
        return plain(self, name)

    monkeypatch.setattr(metadata.PathDistribution, "read_text", told)
    plan_of(PoolRequest(plugins=(PluginSpec("joblib"),), nodes=2), print)
    assert {Path(one).name.partition("-")[0] for one in read} == {"joblib"}


@pytest.mark.usefixtures("third_party")
def test_a_plugin_from_the_working_folder_is_named_as_such(
    golden: Golden, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert plugins.shadowing_packages({"tracker", "jax"}, tmp_path / "elsewhere") == ()
    (said,) = plugins.shadowing_packages({"tracker", "jax"}, tmp_path)
    golden(said)
    monkeypatch.chdir(tmp_path)
    told: list[str] = []
    with pytest.raises(RequestError):
        plan_of(PoolRequest(plugins=(PluginSpec("tracker"),), nodes=0), told.append)
    assert said in told


@pytest.mark.usefixtures("third_party")
@pytest.mark.parametrize(
    ("options", "seen"),
    [
        ({"project": "a"}, "'a' 10 None False"),
        ({"project": "1", "steps": "20", "rate": "0.5", "offline": "yes"}, "'1' 20 0.5 True"),
        ({"project": "true", "steps": 3, "rate": "2", "offline": "OFF"}, "'true' 3 2.0 False"),
    ],
)
def test_options_become_the_parameters_types(options: dict[str, str], seen: str) -> None:
    made = plugins.load(PluginSpec("tracker", options))
    assert made.name == "tracker"
    assert made.bootstrap(Cluster()) == [seen]
    assert made.spec is not None
    assert plugins.load(made.spec).bootstrap(Cluster()) == [seen]


@pytest.mark.usefixtures("third_party")
def test_wrong_and_missing_values_are_refused(golden: Golden) -> None:
    golden(mistakes_of(PluginSpec("tracker", {"steps": "many", "offline": "perhaps"})))


@pytest.mark.usefixtures("third_party")
def test_broken_plugin_fails_only_when_requested(golden: Golden) -> None:
    golden(mistakes_of(PluginSpec("gone"))[0])
    golden(mistakes_of(PluginSpec("wrong"))[0])
    golden(mistakes_of(PluginSpec("fragile")))
    with golden.raises(AttributeError):
        _ = sky.plugins.gone


@pytest.mark.usefixtures("third_party")
def test_our_names_stay_ours() -> None:
    assert isinstance(sky.plugins.torch(), Plugin)


# ---------------------------------------------------------------------------------- hooks and order


def test_empty_plugin_does_nothing() -> None:
    plugin = Plugin("mine")
    image, cluster, info = Image(pip=("numpy",)), Cluster(), InstanceInfo()
    assert plugin.transform(image, cluster) == image
    assert list(plugin.bootstrap(cluster)) == []
    with plugin.around_app(info), plugin.around_client(object()):
        pass
    assert (plugin.release(), list(plugin.rejoin(info)), plugin.joined()) == (0, [], True)  # type: ignore[misc]
    assert plugin.spec is None
    assert plugins.resolve([plugin]) == (plugin,)


def test_hooks_by_hand() -> None:
    seen: list[object] = []

    @contextlib.contextmanager
    def around(info: InstanceInfo) -> Iterator[None]:
        seen.append(info.rank)
        yield
        seen.append("left")

    with Plugin("mine", around_app=around).around_app(InstanceInfo()):
        seen.append("inside")
    assert seen == [0, "inside", "left"]


def test_cluster_reports_cuda() -> None:
    assert not Cluster().cuda
    assert Cluster(accelerator=Accelerator("A100", 8)).cuda


def test_the_same_plugin_twice_is_a_mistake(golden: Golden) -> None:
    found = mistakes_of(
        PluginSpec("torch"), sky.plugins.torch(backend="gloo"), Plugin("mine"), Plugin("mine")
    )
    golden(found)


def test_plugins_keep_order_except_for_requirements() -> None:
    jax, keras, other = Plugin("jax", before=("keras",)), Plugin("keras"), Plugin("other")
    assert plugins.order([keras, other, jax]) == (other, jax, keras)
    assert plugins.order([other, keras]) == (other, keras)
    assert plugins.order([jax, keras, other]) == (jax, keras, other)
    assert plugins.order([]) == ()


def test_an_order_that_cannot_be(golden: Golden) -> None:
    with golden.raises(RequestError):
        plugins.order([Plugin("a", before=("b",)), Plugin("b", before=("a",))])
