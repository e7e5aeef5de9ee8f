"""What an environment gets: the notebook's versions, the build that fits the machine, from indexes that answer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from skymagic.bootstrap.builds import backend_for, build_constraints, lines
from skymagic.bootstrap.facts import HostFacts, PlannedWheel
from skymagic.bootstrap.provision import probe, setup
from skymagic.bootstrap.remote import Installation
from skymagic.bootstrap.requirements import Requirements, pinned, preferred, requirements_of
from skymagic.errors import HostError
from skymagic.plan.image import Image
from tests.lab.raising import raises
from tests.lab.shells import SMALL, ShellHost, cache, home, used_home, uv, with_uv
from tests.lab.wheels import installed, make_wheel, mute, served

__all__ = ["cache", "home", "used_home", "uv"]


@pytest.fixture
def notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the notebook has beside its own packages."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    return folder


@pytest.fixture
def index(tmp_path: Path) -> Path:
    """All that the host can install."""
    return tmp_path / "links"


@pytest.fixture
def host(used_home: Path, index: Path) -> ShellHost:
    """A machine whose pip takes packages from `index` alone."""
    return ShellHost(used_home, env={"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(index)})


def wanting(*packages: str) -> Requirements:
    """An environment with these packages, and without those of ranks."""
    return replace(SMALL, packages=pinned(packages), preferences=preferred(packages))


def versions(host: ShellHost, ready: Installation, *names: str) -> dict[str, str]:
    """The versions of distributions in a host's environment."""
    code = "import sys, importlib.metadata as m; print(*map(m.version, sys.argv[1:]))"
    out = host.run(f'"{ready.python}" -c "{code}" {" ".join(names)}').out
    return dict(zip(names, out.split(), strict=True))


def torch_wheels(index: Path, cpu: bool = True) -> None:
    """PyTorch as indexes have it: a build for CUDA without a label, which needs libraries, and one for CPUs."""
    make_wheel(index, "nvidia-libs", "13.0")
    for version in ("2.13.0", "2.14.0"):
        make_wheel(index, "torch", version, ["nvidia-libs"])
        if cpu:
            make_wheel(index, "torch", f"{version}+cpu")


def with_gpu(host: ShellHost, folder: Path) -> None:
    """Let the host have a GPU."""
    folder.mkdir()
    program = folder / "nvidia-smi"
    program.write_text(
        "#!/bin/sh\necho 0, GPU-0, NVIDIA A100-SXM4-80GB, 81920, Default, Disabled\n"
    )
    program.chmod(0o755)
    host.env = {**host.env, "PATH": f"{folder}:{host.environment()['PATH']}"}


def test_versions_are_the_notebooks(notebook: Path, index: Path, host: ShellHost, uv: str) -> None:
    """Of the requested packages and their dependencies; constraints and `latest` override them. A host without GPUs gets no CUDA."""
    torch_wheels(index)
    installed(notebook, "torch", "2.13.0+cu130", ["nvidia-libs"])
    asked = ("torch", "sky-asked", "sky-latest>=0", "sky-bound>1", "sky-within>=1", "sky-elsewhere")
    for name in (
        "sky-asked",
        "sky-latest",
        "sky-bound",
        "sky-within",
        "sky-needed",
        "sky-elsewhere",
    ):
        needs = ["sky-needed"] if name == "sky-asked" else []
        for version in ("1.0", "2.0"):
            make_wheel(index, name, version, needs)
        if name != "sky-elsewhere":
            installed(notebook, name, "1.0+here", needs)
    wanted, told = wanting(*asked), list[str]()
    ready = setup(host, wanted, told.append, with_uv(host, wanted, uv))
    assert "installing packages with uv" in told
    assert not any("another way" in line for line in told)
    assert versions(
        host,
        ready,
        "sky-asked",
        "sky-needed",
        "sky-latest",
        "sky-bound",
        "sky-within",
        "sky-elsewhere",
    ) == {
        "sky-asked": "1.0",
        "sky-needed": "1.0",
        "sky-latest": "2.0",
        "sky-bound": "2.0",
        "sky-within": "1.0",
        "sky-elsewhere": "2.0",
    }


# ---------------------------------------------------------------------------------------------------- builds


def test_a_host_with_a_gpu_gets_the_build_for_it(
    notebook: Path, index: Path, host: ShellHost, uv: str, tmp_path: Path
) -> None:
    torch_wheels(index)
    installed(notebook, "torch", "2.13.0+cpu")
    with_gpu(host, tmp_path / "bin")
    wanted = wanting("torch")
    facts = with_uv(host, wanted, uv)
    assert facts.env.endswith("-cuda"), "hosts with GPUs and without may share a home"
    ready = setup(host, wanted, print, facts)
    assert versions(host, ready, "torch", "nvidia-libs") == {
        "torch": "2.13.0",
        "nvidia-libs": "13.0",
    }


def test_build_is_chosen_by_its_label_without_an_index() -> None:
    cpu = HostFacts("Linux", "x86_64", "n", "/h", "/h/s")
    pins = ("torch==2.13.0", "numpy==2.0", "torchvision>=1", "torch==2.13.0")
    assert build_constraints(pins, cpu) == ("torch==2.13.0+cpu",)
    assert build_constraints(pins, replace(cpu, driver="580.1")) == ("torch!=2.13.0+cpu",)


def test_a_build_for_cuda_alone_needs_consent(
    notebook: Path, index: Path, host: ShellHost, uv: str
) -> None:
    """As `-y` gives."""
    torch_wheels(index, cpu=False)
    installed(notebook, "torch", "2.13.0+cpu")
    wanted = wanting("torch")
    with raises(HostError, "setup", "only builds for CUDA"):
        setup(host, wanted, print, with_uv(host, wanted, uv))
    wanted = replace(wanted, any_build=True)
    ready = setup(host, wanted, print, with_uv(host, wanted, uv))
    assert versions(host, ready, "torch") == {"torch": "2.13.0"}


def test_equal_hosts_share_their_lines() -> None:
    """Also if an index reported sizes to only one of them; a host of another platform is listed separately."""
    names = [f"needed-{number}" for number in range(61)]
    wanted = replace(
        SMALL,
        packages=("pandas==3",),
        preferences=tuple(f"{name}==1" for name in names),
        requested=frozenset({"pandas"}),
    )
    index = "pypi.org"
    planned = [
        PlannedWheel(name, "1", nbytes=1_000_000 * (number + 1), source=index)
        for number, name in enumerate(names)
    ]
    pandas = PlannedWheel("pandas", "3", nbytes=12_400_000, source=index)
    linux = HostFacts("Linux", "x86_64", "n", "/h", "/h/s", libc="glibc 2.36")
    knows_all = replace(linux, planned=(pandas, *planned))
    knows_some = replace(linux, hostname="m", planned=(replace(pandas, nbytes=None), *planned))
    named = "needed-60 1, needed-59 1, needed-58 1, needed-57 1, needed-56 1 and 56 more"
    expected = (
        f"pandas 3, 12.4 MB, from {index}",
        f"61 packages that these and the ranks need (1.9 GB): {named}",
    )
    for hosts in (
        {"a": knows_all, "b": knows_some},
        {"a": knows_some, "b": knows_all},
        {"a": knows_all, "b": knows_all, "c": knows_some},
    ):
        assert lines(wanted, hosts) == expected
    arm = replace(knows_all, machine="aarch64", planned=(pandas, *planned[:2]))
    asked, *rest = lines(wanted, {"a": knows_all, "arm": arm, "b": knows_some})
    assert asked == expected[0]
    assert [line.rpartition(" (on ")[2] for line in rest] == ["a, b)", "arm)"]
    assert " (3.0 MB): needed-1 1, needed-0 1 (on" in rest[1]


def test_a_host_without_gpus_gets_no_cuda_by_the_back_door(
    index: Path, host: ShellHost, uv: str
) -> None:
    """A package that the notebook lacks may depend on CUDA packages."""
    torch_wheels(index, cpu=False)
    make_wheel(index, "sky-trainer", "1.0", ["torch"])
    wanted = wanting("sky-trainer")
    facts = with_uv(host, wanted, uv)
    with pytest.raises(HostError, match="(?s)only builds for CUDA.*add --plugin torch and -y"):
        setup(host, wanted, print, facts)
    assert "torch" not in host.run("find ~/.skymagic/env").out


def test_named_cuda_build_is_for_gpus() -> None:
    image = Image(
        pip=("sky-one",),
        pip_indexes=("https://download.pytorch.org/whl/cu126", "https://example.org/simple"),
    )
    requirements = requirements_of(image)
    assert requirements.indexes == ("https://example.org/simple",)
    facts = HostFacts(system="Linux", machine="x86_64", hostname="n", home="/h", folder="/h/s")
    assert backend_for(requirements, facts) == "cpu"
    assert backend_for(requirements, replace(facts, gpus=("A100",))) == "cu126"
    default = requirements_of(
        image.replace(pip_indexes=("https://download.pytorch.org/whl/cu128",))
    )
    assert backend_for(default, replace(facts, gpus=("A100",))) == "auto"
    nightly = image.replace(pip_indexes=("https://download.pytorch.org/whl/nightly/cu130",))
    assert requirements_of(nightly).indexes == nightly.pip_indexes


# --------------------------------------------------------------------------------------------------- indexes


@pytest.mark.parametrize("private", ["default", "further", "asked for"])
def test_a_public_package_does_not_stand_in_for_a_private_one(
    private: str, notebook: Path, tmp_path: Path, used_home: Path, uv: str
) -> None:
    """Whatever its version is; if the private one does not fit, nothing is installed."""
    own, public, told = tmp_path / "own", tmp_path / "public", list[str]()
    make_wheel(own, "sky-acme", "1.0")
    make_wheel(public, "sky-acme", "99.0")
    make_wheel(public, "sky-other", "3.0")
    with served(own) as mine, served(public) as pypi:
        host = ShellHost(
            used_home,
            env={
                "PIP_FIND_LINKS": "",
                "PIP_CONFIG_FILE": "/dev/null",
                "UV_INDEX_STRATEGY": "",
                "no_proxy": "*",
                "PIP_INDEX_URL": mine if private == "default" else pypi,
                "PIP_EXTRA_INDEX_URL": {"default": pypi, "further": mine}.get(private, ""),
            },
        )
        if private == "default":  # as pypi.org would be known to be
            host.env = {**host.env, "UV_INDEX": mine, "UV_DEFAULT_INDEX": pypi}
        indexes = (mine,) if private == "asked for" else ()
        wanted = replace(wanting("sky-acme", "sky-other"), indexes=indexes)
        ready = setup(host, wanted, told.append, with_uv(host, wanted, uv))
        found = versions(host, ready, "sky-acme", "sky-other")
        assert found == {"sky-acme": "1.0", "sky-other": "3.0"}
        newer = replace(wanting("sky-acme>=2", "sky-other"), indexes=indexes)
        with pytest.raises(HostError, match="sky-acme"):
            setup(host, newer, told.append, replace(probe(host, newer), uv=uv))


@pytest.mark.parametrize("place", ["default", "further", "asked for"])
def test_an_index_that_does_not_answer_is_left_out(
    place: str,
    notebook: Path,
    index: Path,
    used_home: Path,
    uv: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is tried once, not for each package, and shown without its password."""
    monkeypatch.setattr("skymagic.bootstrap.probe.ANSWER_SECONDS", 3)
    for name in ("sky-one", "sky-two", "sky-three"):
        make_wheel(index, name, "1.0")
    wanted = wanting("sky-one", "sky-two", "sky-three")
    with served(index) as good, mute() as (bad, connections):
        secret = bad.replace("http://", "http://me:hush-hush@")
        host = ShellHost(
            used_home, env={"PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": "/dev/null", "no_proxy": "*"}
        )
        first, more = (
            (secret, good) if place == "default" else (good, secret if place == "further" else "")
        )
        host.env = {**host.env, "PIP_INDEX_URL": first, "PIP_EXTRA_INDEX_URL": more}
        if place == "asked for":
            wanted = replace(wanted, indexes=(secret,))
        facts = with_uv(host, wanted, uv)
        ((silent, reason),) = facts.silent
        assert silent == bad
        assert " 3 s" in reason
        asked = len(connections)
        told: list[str] = []
        ready = setup(host, wanted, told.append, facts)
        assert len(connections) == asked == 1
    assert sum(bad in message for message in told) == 1
    assert "hush" not in "\n".join(told)
    assert versions(host, ready, "sky-one") == {"sky-one": "1.0"}
