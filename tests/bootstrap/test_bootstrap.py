"""The shell text that sets nodes up: word for word, in every shell that may read it, and what becomes of its answers."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from shlex import quote

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from skymagic.bootstrap import install, probe, shell, wheel
from skymagic.bootstrap.facts import HostFacts, Python, parse
from skymagic.bootstrap.install import UPLOADED, InstallPlan, install_script, plan_install
from skymagic.bootstrap.messages import InstallFailure, explain_unusable, lacks_uv
from skymagic.bootstrap.probe import PACKAGES_PROBE, PYTHON_PROBE, probe_script
from skymagic.bootstrap.progress import InstallProgress
from skymagic.bootstrap.provision import Addition, addition_script
from skymagic.bootstrap.remote import Installation
from skymagic.bootstrap.requirements import Requirements
from skymagic.bootstrap.shell import any_shell, any_shell_word
from tests.lab.golden import Golden

GOLDEN = Path(__file__).parent / "golden"
HOSTILE = 'it\'s $HOME `id` "x" \\ !y\n*'

WANTED = Requirements(
    python="3.11",
    minor="3.11",
    packages=("numpy==2.0", "it's; echo $HOME", "a[b]>=1,<2"),
    preferences=("six==1.17.0",),
    indexes=("https://user:pa$$'word@example.org/simple",),
    files=(("/home/me/my wheels/x-1.0-py3-none-any.whl", "0123"),),
    commands=("echo 'done' && echo \"$HOME\"",),
    code="0123456789abcdef",
)
FACTS = HostFacts(
    system="Linux", machine="x86_64", hostname="node", home="/home/it's me", folder="/home/it's me/.skymagic",
    libc="glibc 2.36", cpus=4, memory_kb=8_000_000, disk_kb=10_000_000, env="KEY-Linux-x86_64",
    pythons=(Python("3.9", "/usr/bin/python3"), Python("3.11", "/opt/my python/bin/python3.11")),
)  # fmt: skip
RECIPE = plan_install(WANTED, FACTS, "token", "skymagic-1.0-py3-none-any.whl")
SCRIPTS = {
    "probe.sh": probe_script(WANTED),
    "install.sh": install_script(RECIPE, FACTS),
    "add.sh": addition_script(
        Installation("/p", FACTS, "/c", WANTED),
        Addition(("pandas==3.0", "it's"), ("numpy==2.0",), ("six==1.0",), (Path("/w/my x-1.whl"),)),
        "token",
    ),
}

CONSTANTS = {
    **{name: vars(module)[name] for module, names in {
        install: ("_MAIN", "_ENVIRONMENT", "_PACKAGES"), shell: ("UV_SETTINGS",), probe: ("_BODY",),
    }.items() for name in names},
    **{name: quote(text) for name, text in {
        "PYTHON_PROBE": PYTHON_PROBE, "PACKAGES_PROBE": PACKAGES_PROBE, "SOURCES_PROBE": probe.SOURCES_PROBE, "INDEXES_PROBE": probe.INDEXES_PROBE,
    }.items()},
}  # fmt: skip
"""What is in the scripts as it stands in the package, by name; Python's text is one word of sh."""


# ------------------------------------------------------------------------------------------------------ text


def folded(script: str) -> str:
    """A script with the name of each of the package's constants in the constant's place: what is left is what hosts and requests change."""
    for name, text in CONSTANTS.items():
        assert script.count(text) <= 1, f"{name} is there twice"
        script = script.replace(text, f"\n<{name}>\n" if text.startswith("\n") else f"<{name}>")
    return script


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_word_for_word(name: str) -> None:
    """Run with SKYMAGIC_GOLDEN=write to accept a change that you have reviewed."""
    if os.environ.get("SKYMAGIC_GOLDEN") == "write":
        (GOLDEN / name).write_text(folded(SCRIPTS[name]))
    assert folded(SCRIPTS[name]) == (GOLDEN / name).read_text()


@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.parametrize("shell", ["sh", "bash"])
def test_scripts_are_shell_text(name: str, shell: str) -> None:
    subprocess.run([shell, "-n"], input=SCRIPTS[name], text=True, check=True, capture_output=True)


def test_interpreter_reports_its_packages(tmp_path: Path) -> None:
    """From folder names where possible, otherwise from importlib.metadata; missing packages are omitted."""
    (tmp_path / "old_style.egg-info").mkdir()
    (tmp_path / "old_style.egg-info/PKG-INFO").write_text(
        "Metadata-Version: 1.0\nName: old-style\nVersion: 1.5\n"
    )
    words = [
        sys.executable,
        "-c",
        PYTHON_PROBE + PACKAGES_PROBE,
        "IPython",
        "jupyter-client",
        "old.style",
        "not-there",
    ]
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(words, env=env, capture_output=True, text=True, check=True)
    first, *told = done.stdout.splitlines()
    assert first.startswith(f"{sys.version_info[0]}.{sys.version_info[1]} /")
    there = [
        ("IPython", version("ipython")),
        ("jupyter-client", version("jupyter_client")),
        ("old.style", "1.5"),
    ]
    assert sorted(told) == [f"@sky package {name} {found}" for name, found in there]


@pytest.mark.parametrize("name", ["probe.sh", "install.sh", "add.sh"])
def test_passwords_are_on_no_command_line(name: str) -> None:
    """The URL of an index occurs in a script, which the host reads from standard input, only in assignments and in builtins that write files."""
    (line,) = [line.strip() for line in SCRIPTS[name].splitlines() if "pa$$" in line]
    assert line.startswith("further=" if name == "probe.sh" else "printf ")


def test_list_of_packages_is_as_requested(tmp_path: Path) -> None:
    text = SCRIPTS["install.sh"]
    function = text[text.index("requirements() {") : text.index("commands() {")]
    subprocess.run(
        ["sh", "-s"], input=f"drop={tmp_path}\n{function}\nrequirements\n", text=True, check=True
    )
    assert (tmp_path / "requirements.txt").read_text().splitlines() == [
        "numpy==2.0",
        "it's; echo $HOME",
        "a[b]>=1,<2",
        "file:///home/it%27s%20me/.skymagic/incoming/token/files/x-1.0-py3-none-any.whl",
    ]
    assert (tmp_path / "indexes.txt").read_text() == "https://user:pa$$'word@example.org/simple\n"


def test_uv_gets_the_configuration_of_pip(tmp_path: Path) -> None:
    (tmp_path / ".config/pip").mkdir(parents=True)
    (tmp_path / "own.conf").write_text("[install]\ntrusted-host: b\n[other]\nindex-url = no\n")
    (tmp_path / "cert").touch()
    (tmp_path / ".config/pip/pip.conf").write_text(
        "[global]\n; a comment\nindex-url = https://a:b@c/simple\nextra_index_url =\n  https://d/simple\n\thttps://e\n"
        f"cert = {tmp_path}/cert\ntrusted-host = a\nfind-links = https://f {tmp_path}/none {tmp_path}\n"
    )
    settings = {
        "PIP_CONFIG_FILE": str(tmp_path / "own.conf"),
        "PIP_EXTRA_INDEX_URL": "https://g https://h",
        "UV_INSECURE_HOST": "mine",
    }
    said = uv_variables(tmp_path, settings)
    assert said["UV_DEFAULT_INDEX"] == "https://a:b@c/simple"
    assert said["UV_INDEX"] == "https://g https://h"
    assert said["UV_FIND_LINKS"] == f"https://f,{tmp_path}"
    assert said["UV_INSECURE_HOST"] == "mine"
    assert said["SSL_CERT_FILE"] == f"{tmp_path}/cert"
    assert "UV_INDEX_STRATEGY" not in said


PYPI, TORCH = "https://pypi.org/simple", "https://download.pytorch.org/whl/cpu"


@pytest.mark.parametrize(
    ("settings", "asked", "strategy"),
    [
        ({}, [None, PYPI], None),
        ({"PIP_EXTRA_INDEX_URL": "https://own/s"}, ["https://own/s", PYPI], None),
        # uv asks further indexes before the default one, which pip does not distinguish
        (
            {"PIP_INDEX_URL": "https://own/s", "PIP_EXTRA_INDEX_URL": f"{PYPI}/"},
            ["https://own/s", f"{PYPI}/"],
            None,
        ),
        (
            {"PIP_INDEX_URL": "https://own/s", "PIP_EXTRA_INDEX_URL": "https://me:pw@pypi.org/simple"},
            ["https://own/s", "https://me:pw@pypi.org/simple"],
            None,
        ),
        ({"PIP_EXTRA_INDEX_URL": "https://b https://c"}, ["https://b https://c", PYPI], None),
        # PyTorch's index is for PyTorch's packages, and uv knows it
        ({"PIP_EXTRA_INDEX_URL": TORCH}, [None, PYPI], None),
        ({"PIP_INDEX_URL": "https://own/s", "PIP_EXTRA_INDEX_URL": TORCH}, [None, "https://own/s"], None),
        ({"PIP_EXTRA_INDEX_URL": f"{TORCH} https://own/s"}, ["https://own/s", PYPI], None),
        ({"UV_INDEX": TORCH}, [TORCH, None], None),
        ({"UV_INDEX": "https://own/s"}, ["https://own/s", None], None),
        ({"UV_INDEX": f"{TORCH} https://own/s"}, [f"{TORCH} https://own/s", None], None),
        ({"UV_EXTRA_INDEX_URL": "https://own/s", "PIP_EXTRA_INDEX_URL": TORCH}, ["https://own/s", PYPI], None),
        # who looks like it is not PyTorch's
        ({"PIP_EXTRA_INDEX_URL": "https://own/download.pytorch.org/whl"}, ["https://own/download.pytorch.org/whl", PYPI], None),
        ({"PIP_EXTRA_INDEX_URL": "https://download.pytorch.org.evil/w"}, ["https://download.pytorch.org.evil/w", PYPI], None),
        ({"PIP_EXTRA_INDEX_URL": "https://download.pytorch.org:pw@evil/w"}, ["https://download.pytorch.org:pw@evil/w", PYPI], None),
        # the user's own word
        ({"PIP_EXTRA_INDEX_URL": "https://b", "UV_INDEX_STRATEGY": "unsafe-first-match"}, ["https://b", PYPI], "unsafe-first-match"),
    ],
)  # fmt: skip
def test_a_private_package_has_no_rival(
    tmp_path: Path, settings: dict[str, str], asked: list[str | None], strategy: str | None
) -> None:
    """The indexes that uv queries first and last, and whether it compares their versions."""
    assert uv_environment(tmp_path, settings) == [*asked, strategy]


def test_an_index_of_the_request_counts(tmp_path: Path) -> None:
    (tmp_path / "indexes.txt").write_text("https://own/simple\n")
    assert uv_environment(tmp_path, {}) == ["https://own/simple", PYPI, None]
    further = {"PIP_EXTRA_INDEX_URL": TORCH}
    assert uv_environment(tmp_path, further) == ["https://own/simple", PYPI, None]
    users_own = {"UV_INDEX": "https://more/simple"}
    assert uv_environment(tmp_path, users_own) == [
        "https://own/simple https://more/simple",
        None,
        None,
    ]
    (tmp_path / "indexes.txt").write_text(f"{PYPI}\n")
    own = {"PIP_INDEX_URL": "https://own/simple"}
    assert uv_environment(tmp_path, own) == ["https://own/simple", PYPI, None]
    nightly = TORCH.replace("cpu", "nightly/cpu")
    (tmp_path / "indexes.txt").write_text(f"{nightly}\n")
    assert uv_environment(tmp_path, {}) == [nightly, PYPI, "unsafe-best-match"]
    private = {"PIP_EXTRA_INDEX_URL": "https://own/simple"}
    assert uv_environment(tmp_path, private) == [f"https://own/simple {nightly}", PYPI, None]


def uv_environment(folder: Path, settings: dict[str, str]) -> list[str | None]:
    """What a host with these settings tells uv: further indexes, the default one, and how to choose among them."""
    said = uv_variables(folder, settings)
    return [said.get(name) for name in ("UV_INDEX", "UV_DEFAULT_INDEX", "UV_INDEX_STRATEGY")]


def uv_variables(folder: Path, settings: dict[str, str]) -> dict[str, str]:
    """The environment of uv on a host with this home folder and these settings."""
    text = SCRIPTS["install.sh"]
    functions = text[text.index("pip_says() {") : text.index("requirements() {")]
    done = subprocess.run(
        ["sh", "-s"],
        input=f"folder=/f drop={folder}\n{functions}\nuv_settings\nenv\n",
        env={"PATH": os.environ["PATH"], "HOME": str(folder), **settings},
        text=True,
        check=True,
        capture_output=True,
    )
    return dict(line.split("=", 1) for line in done.stdout.splitlines())


@given(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20))
@example(HOSTILE)
def test_words_within_any_shell(text: str) -> None:
    command = any_shell(f"printf %s {any_shell_word(text)} x")
    assert not set(command.removeprefix("exec /bin/sh -c '").removesuffix("'")) & set("'!\n")
    out = subprocess.run(["sh", "-c", command], capture_output=True, check=True).stdout.decode()
    assert out == text.rstrip("\n") + "x"


def test_a_folder_under_home_and_elsewhere() -> None:
    for folder, line in {
        None: 'folder=${SKYMAGIC_HOME:-"${HOME-}/.skymagic"}',
        "/scratch/it's": "folder='/scratch/it'\"'\"'s'",
        "~/sky": 'folder="${HOME-}"/sky',
    }.items():
        assert line in probe_script(replace(WANTED, folder=folder)).splitlines()


# ------------------------------------------------------------------------------------------------------- keys


def test_equal_images_share_an_environment_and_others_do_not(tmp_path: Path) -> None:
    same = replace(WANTED, code="another", folder="/elsewhere")
    assert same.key == WANTED.key
    moved = replace(WANTED, files=(("/elsewhere/x-1.0-py3-none-any.whl", "0123"),))
    assert moved.key == WANTED.key
    others = [
        replace(WANTED, packages=("numpy==2.1",)), replace(WANTED, indexes=()), replace(WANTED, commands=()),
        replace(WANTED, files=(("/home/me/x-1.0-py3-none-any.whl", "4567"),)),
        replace(WANTED, python="3.12", minor="3.12"),
    ]  # fmt: skip
    assert len({WANTED.key, *(other.key for other in others)}) == len(others) + 1


def test_the_wheel_is_the_same_for_the_same_sources(tmp_path: Path) -> None:
    files = {"skymagic/__init__.py": b"x = 1\n", "skymagic/py.typed": b""}
    assert wheel.build(files, "1.0") == wheel.build(dict(files), "1.0")
    assert wheel.digest(files) != wheel.digest({**files, "skymagic/py.typed": b" "})
    package = tmp_path / "skymagic"
    (package / "__pycache__").mkdir(parents=True)
    (package / "__pycache__/a.pyc").write_bytes(b"")
    (package / "a.py").write_bytes(b"")
    assert wheel.contents(package) == {"skymagic/a.py": b""}


def test_the_wheel_is_one_that_pip_takes(tmp_path: Path) -> None:
    _, name, data = wheel.running_wheel()
    path = tmp_path / name
    path.write_bytes(data)
    from pip._vendor.packaging.utils import parse_wheel_filename

    assert parse_wheel_filename(name)[0] == "skymagic"


# ----------------------------------------------------------------------------------------------------- answers


def test_an_answer_between_other_peoples_lines() -> None:
    facts = parse(
        "Welcome!\n@sky system Linux\nsomebody says @sky system Plan9\n@sky machine x86_64\n@sky hostname n\n"
        "@sky home /home/a b\n@sky folder /home/a b/.skymagic\n@sky memory_kb 1000000\n@sky cpus 8\n@sky shm_kb\n"
        "@sky gpu 0, GPU-a, NVIDIA A100-SXM4-80GB, 81920, Default, Disabled\n@sky gpu 1, GPU-b, NVIDIA A100-SXM4-80GB, 81920, Default, Disabled\n"
        "@sky address eth0 10.0.0.4\n"
        "@sky python 3.11 /opt/my python\n@sky python 3.11 /opt/my python\n@sky python\n"
        "@sky package numpy 2.0\n@sky ready KEY\n@sky env KEY\n@sky end\n"
    )
    assert (facts.system, facts.home, facts.cpus, facts.shm_kb) == ("Linux", "/home/a b", 8, None)
    assert facts.pythons[0] == Python("3.11", "/opt/my python")
    assert facts.addresses == (("eth0", "10.0.0.4"),)
    assert facts.packages == {"numpy": "2.0"}
    assert (facts.ready, facts.code) == (True, False)
    inventory = facts.inventory()
    assert (tuple(one.name for one in inventory.gpus), inventory.cpus, inventory.memory_gb) == (
        ("NVIDIA A100-SXM4-80GB",) * 2,
        8,
        1.0,
    )


@pytest.mark.parametrize(
    "out", ["", "'/bin/sh' is not recognized", "@sky system Linux\n", "@sky end"]
)
def test_an_answer_that_is_none(out: str) -> None:
    with pytest.raises(ValueError, match="probe"):
        parse(out)


# ------------------------------------------------------------------------------------------------------ choice


def test_how_an_environment_is_made() -> None:
    def by(**changes: object) -> tuple[str, str]:
        recipe = plan_install(WANTED, replace(FACTS, **changes), "t", "w")  # type: ignore[arg-type]
        return recipe.python, recipe.uv

    fitting = Python("3.11", "/fitting")
    assert by(pythons=(Python("3.12", "/other"), fitting)) == ("/fitting", UPLOADED)
    assert by(pythons=(Python("3.12", "/other"),)) == ("", UPLOADED)
    assert by(pythons=(fitting,), uv="/bin/uv") == ("/fitting", "/bin/uv")
    assert by(pythons=(), uv="/bin/uv") == ("", "/bin/uv")


def test_present_files_are_not_sent_again() -> None:
    assert plan_install(WANTED, replace(FACTS, ready=True), "t", "w") == InstallPlan(
        WANTED, FACTS.env, "", "t", wheel="w"
    )
    assert plan_install(WANTED, replace(FACTS, code=True), "t", "w").wheel == ""


# ------------------------------------------------------------------------------------------------------- words


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"refusal": "cannot create: Read-only file system"}, "nothing can be written at"),
        ({"refusal": "write error: No space left on device"}, "disk is full"),
        ({"noexec": "/home"}, "noexec"),
        ({"disk_kb": 1000}, "1.0 MB free"),
        ({"folder": "relative"}, "not an absolute path"),
    ],
)
def test_why_nothing_can_be_set_up(changes: dict[str, object], words: str) -> None:
    (sentence,) = explain_unusable(replace(FACTS, **changes), WANTED)  # type: ignore[arg-type]
    assert words in sentence
    assert "--env SKYMAGIC_HOME=" in sentence
    if "folder" not in changes:
        ready = replace(FACTS, ready=True, code=True, **changes)  # type: ignore[arg-type]
        assert explain_unusable(ready, WANTED) == [], "what is ready is used, wherever it is"


@pytest.mark.parametrize("what", ["foreign", "exposed"])
def test_files_of_other_users_are_not_run(what: str) -> None:
    for facts in (FACTS, replace(FACTS, ready=True, code=True)):
        (sentence,) = explain_unusable(replace(facts, **{what: "drwxrwxrwx 2 eve eve"}), WANTED)  # type: ignore[arg-type]
        assert "drwxrwxrwx 2 eve eve" in sentence
        assert "--env SKYMAGIC_HOME=" in sentence


def test_unusable_interpreter_is_explained(golden: Golden) -> None:
    requirements = replace(
        WANTED, python="/x/python", packages=("numpy>=2", "xxhash"), files=(), commands=()
    )
    facts = replace(FACTS, pythons=(), packages={})
    golden(explain_unusable(facts, requirements))
    facts = replace(
        FACTS, pythons=(Python("3.9", "/x/python"),), packages={"numpy": "1.0", "XXHash": "3"}
    )
    version, lacks = explain_unusable(facts, requirements)
    golden(version)
    assert 'numpy>=2 (it has 1.0): run `/x/python -m pip install "numpy>=2"` there' in lacks
    good = replace(
        facts, pythons=(Python("3.11", "/x/python"),), packages={"numpy": "2.1", "xxhash": "3"}
    )
    assert explain_unusable(good, requirements) == []
    golden(explain_unusable(good, replace(requirements, files=WANTED.files)))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device", "disk is full"),
        ("error: Disk quota exceeded (os error 122)", "disk is full"),
        ("ERROR: No matching distribution found for nonsense==9", "pip_indexes"),
        ("  cause: dns error: failed to lookup address information: Name or service not known", "does not reach"),
        ("SSLCertVerificationError(1, '[SSL: CERTIFICATE_VERIFY_FAILED] …; no matching distribution", "does not trust"),
        ("error: No interpreter found for Python 3.14 in managed installations", "uv found no Python 3.11"),
        ("ERROR: ResolutionImpossible: for help visit https://pip.pypa.io", "contradict"),
        ("error: Failed to deserialize cache entry", "uv's cache on node is damaged"),
        ("  Caused by: A path dependency is incompatible with the current platform: /x.whl", "no wheel for this kind"),
        ("Segmentation fault", "create the pool again"),
    ],
)  # fmt: skip
def test_failed_step_has_a_remedy(line: str, words: str) -> None:
    failure = InstallFailure("installing", "pip install", 1, (line,), 5_000_000, "3.11")
    assert words in failure.remedy(FACTS)
    assert line in failure.reason


def test_a_full_disk_is_seen_whatever_was_printed(golden: Golden) -> None:
    golden(InstallFailure("s", "c", 1, ("Killed",), 1000).remedy(FACTS))


def test_no_password_and_no_secret_of_a_command_is_shown() -> None:
    told: list[str] = []
    progress = InstallProgress(told.append, ["hush-hush"])
    for line in (
        "@sky step running: curl https://me:hush@example.org",
        "Looking in indexes: https://me:hush@example.org/simple",
        "Downloading https://me:hush@example.org/x.whl",
        "@sky command pip install https://me:hush@example.org",
        "@sky step running: hub login --token hf_123456",
        "Downloading hush-hush",
        "unknown token: hf_123456",
        "@sky command hub login --token hf_123456 --user hush-hush",
        "@sky failed 1",
    ):
        progress.feed(line)
    failure = progress.failure(1, "", "3.11")
    everything = "\n".join([*told, failure.reason, failure.remedy(FACTS)])
    assert "hush" not in everything
    assert "hf_1" not in everything
    assert "https://****@example.org/x.whl" in everything
    assert "hub login --token ****" in everything


def test_progress_reports_steps_and_keeps_the_last_lines(golden: Golden) -> None:
    told: list[str] = []
    progress = InstallProgress(told.append)
    for line in (
        "@sky step one", "noise", "@sky waiting", "@sky instead", "@sky step two", *map(str, range(40)), "@sky tick",
        "@sky free 77", "@sky command the command", "@sky failed 3",
    ):  # fmt: skip
        progress.feed(line)
    failure = progress.failure(9, "err", "3.11")
    assert told[0] == "one"
    golden(told[2])
    assert told[3] == "two"
    assert "another pool" in told[1]
    assert (failure.step, failure.command, failure.status, failure.free_kb) == (
        "two",
        "the command",
        3,
        77,
    )
    assert failure.last == tuple(map(str, range(25, 40)))
    assert not progress.done


def test_a_host_that_has_nothing_to_make_an_environment_with(golden: Golden) -> None:
    reason, remedy = lacks_uv(WANTED, replace(FACTS, machine="riscv64"), "no wheel")
    golden(reason)
    assert "Linux riscv64" in reason
    golden(remedy)


def test_colours_of_an_installer_are_no_text(golden: Golden) -> None:
    progress = InstallProgress(lambda said: None)
    progress.feed(
        "\x1b[31mERROR: No matching\x1b[0m distribution \x1b]8;;https://x\x1b\\here\x1b]8;;\x07"
    )
    golden(progress.failure(1, "", "3.11").last)
    assert (
        "\x1b"
        not in InstallProgress(lambda said: None).failure(1, "\x1b[1;31mno\x1b[0m", "3.11").last[0]
    )
