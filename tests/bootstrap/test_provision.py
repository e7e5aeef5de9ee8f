"""Hosts are made ready once, reused at once, and say in words why they cannot be; nothing half-made stays on them."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from packaging.requirements import Requirement

from skymagic.bootstrap import wheel
from skymagic.bootstrap.facts import HostFacts
from skymagic.bootstrap.provision import probe, setup
from skymagic.bootstrap.remote import Installation
from skymagic.bootstrap.requirements import RANK_DEPENDENCIES, Requirements, requirements_of
from skymagic.errors import HostError, RequestError
from skymagic.plan.image import Image, PipIndex
from skymagic.plan.plans import Topology
from skymagic.plan.requests import PoolRequest
from skymagic.providers.aws.provider import needs
from skymagic.ssh.config import SshConfig
from skymagic.ssh.connecting import connect
from skymagic.ssh.host import HostConnection
from skymagic.ssh.hostlist import HostSpec
from tests.lab.hosts import Hosts, loopback, share_code
from tests.lab.raising import raises
from tests.lab.shells import (
    PATH,
    SMALL,
    ShellHost,
    apart,
    bootstrapped_home,
    cache,
    home,
    make_home,
    pip_settings,
    used_home,
    uv,
    with_uv,
)
from tests.lab.wheels import served

__all__ = ["bootstrapped_home", "cache", "home", "used_home", "uv"]

ROOT = Path(__file__).resolve().parents[2]
PREPARED = Image(python=sys.executable)


def left_on(host: ShellHost) -> list[str]:
    """Environments and uploads on a host."""
    out = host.run('cd "${SKYMAGIC_HOME:-$HOME/.skymagic}" && ls -A env incoming').out.split()
    return [name for name in out if not name.endswith((":", ".lock"))]


def refused(
    host: ShellHost, requirements: Requirements = SMALL, facts: HostFacts | None = None
) -> str:
    """Why the host cannot be set up, with what to do."""
    with pytest.raises(HostError) as error:
        setup(host, requirements, print, facts)
    assert error.value.host == "box"
    assert left_on(host) == []
    return str(error.value)


# ------------------------------------------------------------------------------------------ environments


def test_a_ready_host_costs_one_round_trip(bootstrapped_home: Path, home: Path) -> None:
    host = ShellHost(make_home(home, bootstrapped_home))
    told: list[str] = []
    ready = setup(host, requirements_of(Image()), told.append)
    assert host.runs == 1
    assert told == []
    code = "import sys, ipykernel, skymagic; print(sys.prefix, skymagic.__file__, skymagic.__version__)"
    out = through("/bin/sh", host, ready.command("timeit", "-n1", "-r1", code))
    prefix, file, version = out.split()[:3]
    assert prefix == f"{home}/.skymagic/env/{ready.facts.env}"
    assert file == f"{home}/.skymagic/code/{SMALL.code}/skymagic/__init__.py"
    assert version == wheel.version()


def test_an_environment_gets_packages_and_commands(home: Path, cache: Path, tmp_path: Path) -> None:
    """A wheel of the notebook, a wheel found only by pip's configuration on the host, and a plugin's command."""
    links = tmp_path / "links"
    links.mkdir()
    for folder, name in ((links, "tiny_there"), (tmp_path, "tiny_here")):
        files = {f"{name}.py": f"print('{name}')\n".encode()}
        data = wheel.build(files, "1.0", name)
        (folder / f"{name}-1.0-py3-none-any.whl").write_bytes(data)
    (home / ".config/pip").mkdir(parents=True)
    (home / ".config/pip/pip.conf").write_text(
        f"# mine\n[global]\ntimeout = 5\nno_index = true\nfind-links =\n    {tmp_path}/none\n    {links}\n[list]\nfind-links=x\n"
    )
    host = ShellHost(home, env=dict.fromkeys(pip_settings(), ""))
    mine = str(tmp_path / "tiny_here-1.0-py3-none-any.whl")
    image = Image(pip=(mine, "tiny-there>=1"))
    requirements = replace(
        requirements_of(image),
        packages=("tiny-there>=1",),
        commands=("python -c 'import tiny_here' >$HOME/told",),
    )
    ready = setup(host, requirements, print, with_uv(host, requirements, None))
    assert (home / "told").read_text() == "tiny_here\n"
    assert through("sh", host, ready.command("tiny_there")) == "tiny_there\n"
    runs = host.runs
    setup(host, requirements, print)
    assert host.runs == runs + 1


def shelf(folder: Path, wheels: dict[str, str]) -> Path:
    """A folder with these wheels, as name → version, each of which tells its own."""
    folder.mkdir()
    for name, number in wheels.items():
        data = wheel.build({f"{name}.py": f"print({number!r})\n".encode()}, number, name)
        (folder / f"{name}-{number}-py3-none-any.whl").write_bytes(data)
    return folder


def test_an_index_serves_its_packages_and_no_others(
    used_home: Path, uv: str, tmp_path: Path
) -> None:
    """Both indexes have both packages, each the newest of one: what is not listed comes from the host's own index.

    Whatever lies in the home.
    """
    for name in ("random.py", "pip.py", "typing.py", "email.py"):
        (used_home / name).write_text("raise SystemExit('a file of the user')")
    with (
        served(shelf(tmp_path / "own", {"tiny_own": "1.0", "tiny_common": "2.0"})) as own,
        served(shelf(tmp_path / "general", {"tiny_own": "9.0", "tiny_common": "1.0"})) as general,
    ):
        (used_home / ".config/pip").mkdir(parents=True)
        (used_home / ".config/pip/pip.conf").write_text(
            f"[global]\nindex-url = {general}\ntrusted-host = 127.0.0.1\n"
        )
        host = ShellHost(used_home, env={**dict.fromkeys(pip_settings(), ""), "PIP_USER": "1"})
        image = Image(
            pip=("tiny-own", "tiny-common"), pip_indexes=(PipIndex(own, packages=("tiny_own",)),)
        )
        asked = requirements_of(image)
        assert asked.scoped == ((own, ("tiny-own",)),)
        assert asked.key != replace(asked, scoped=()).key
        asked = replace(asked, packages=("tiny-own", "tiny-common"))
        told: list[str] = []
        ready = setup(host, asked, told.append, with_uv(host, asked, uv))
    assert len([message for message in told if "index" in message]) == 1, "the scoped one, first"
    assert "installing packages with uv" in told
    assert through("sh", host, ready.command("tiny_own")) == "1.0\n"
    assert through("sh", host, ready.command("tiny_common")) == "1.0\n"
    assert left_on(host) == [ready.facts.env]


def test_whether_a_python_can_be_fetched(home: Path) -> None:
    """Asked only if no interpreter fits; proxies and local mirrors are left to uv."""
    wanted = replace(SMALL, python="3.99", minor="3.99")

    def unreached(mirror: str, **more: str) -> str:
        env = {
            "PIP_CONFIG_FILE": "/dev/null",
            "PIP_NO_INDEX": "1",
            "UV_PYTHON_INSTALL_MIRROR": mirror,
            **more,
        }
        return probe(ShellHost(home, env=env), wanted).unreached

    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/"
        assert unreached(url) == ""
    assert unreached("http://127.0.0.1:9/") == "127.0.0.1"
    assert unreached("file:///pythons") == ""
    assert unreached("http://127.0.0.1:9/", https_proxy="http://127.0.0.1:9") == ""
    fetched = home / ".skymagic/python/cpython-3.99/bin/python3.99"
    fetched.parent.mkdir(parents=True)
    fetched.write_text("#!/bin/sh\necho 3.99 $0\n")
    fetched.chmod(0o700)
    assert unreached("http://127.0.0.1:9/") == "", "uv has fetched one before"


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (
            {"commands": ("echo why; nonsense --token 's3cret'",)},
            ["running: echo why; nonsense", "exit code 127", "| why\n", "create the pool again"],
        ),
        (
            {"packages": ("no-such-thing-anywhere==9",)},
            ["choosing versions with uv failed", "no-such-thing-anywhere", "pip_indexes"],
        ),
    ],
    ids=["a command", "a package"],
)
def test_failed_command_is_shown_with_its_output(
    asked: dict[str, tuple[str, ...]], words: list[str], used_home: Path, uv: str
) -> None:
    host = ShellHost(used_home, env={"PIP_NO_INDEX": "1"})
    requirements = replace(SMALL, **asked)  # type: ignore[arg-type]
    text = refused(host, requirements, with_uv(host, requirements, uv))
    assert [each for each in words if each not in text] == []


def test_environment_with_another_hosts_python_is_not_changed(home: Path) -> None:
    """Hosts may share a home folder."""
    host = ShellHost(home)
    first = probe(host, SMALL)
    folder = home / ".skymagic/env" / first.env
    (folder / "bin").mkdir(parents=True)
    (folder / "bin/python").symlink_to("/nowhere/python")
    assert probe(host, SMALL).env == first.env, "half-made, and to be made again"
    (folder / ".ready").touch()
    other = probe(host, SMALL)
    assert other.env == f"{first.env}-{first.hostname}"
    assert not other.ready


def test_ranks_need_the_declared_dependencies() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert {Requirement(text) for text in declared} >= {
        Requirement(name + bounds) for name, bounds in RANK_DEPENDENCIES.items()
    }


def test_files_that_are_not_here() -> None:
    with pytest.raises(RequestError) as error:
        requirements_of(Image(pip=("./none.whl", str(ROOT))))
    missing, folder = error.value.mistakes
    assert missing.startswith("pip: ./none.whl ")
    assert folder.startswith(f"pip: {ROOT} ")


# ---------------------------------------------------------------------------------- an interpreter as it is


def test_named_interpreter_is_used_unchanged(tmp_path: Path) -> None:
    home = tmp_path / "my home's"
    home.mkdir()
    host = ShellHost(home)
    first = setup(host, requirements_of(PREPARED), print)
    assert first.python == sys.executable
    assert left_on(host) == []
    runs = host.runs
    assert setup(host, requirements_of(PREPARED), print).code == first.code
    assert host.runs == runs + 1


def test_an_interpreter_that_lacks_something(home: Path, tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "bare")], check=True
    )
    python = str(tmp_path / "bare/bin/python")
    text = refused(ShellHost(home), requirements_of(Image(python=python, pip=("numpy>=2",))))
    for name, bounds in RANK_DEPENDENCIES.items():
        assert str(Requirement(name + bounds)) in text
    assert "numpy>=2" in text
    assert f"run `{python} -m pip install " in text
    with raises(HostError, "setup", "/no/python"):
        setup(ShellHost(home), requirements_of(Image(python="/no/python")), print)
    assert left_on(ShellHost(home)) == []


def test_a_folder_that_others_may_write_to(home: Path) -> None:
    host = ShellHost(home)
    setup(host, requirements_of(PREPARED), print)
    folder = home / ".skymagic"
    assert folder.stat().st_mode & 0o777 == 0o700
    for mode in (0o720, 0o702):
        folder.chmod(mode)
        assert f"`chmod 700 {folder}`" in refused(host, requirements_of(PREPARED))
    folder.chmod(0o755)
    setup(host, requirements_of(PREPARED), print)


def test_system_packages_of_a_rented_machine(used_home: Path, uv: str, tmp_path: Path) -> None:
    """Installed by its user's sudo; a program in its place records the commands."""
    (tmp_path / "sudo").write_text(f'#!/bin/sh\necho "sudo $*" >>{tmp_path}/told\n')
    (tmp_path / "sudo").chmod(0o700)
    image, asked = needs(
        PoolRequest(provider="aws", image=Image(apt=("git", "odd name"))), Topology(1, 1), print
    )
    assert image.apt == ("git", "odd name")
    host = ShellHost(used_home, env={"PATH": f"{tmp_path}:{PATH}"})
    requirements = replace(SMALL, commands=asked.commands)
    setup(host, requirements, print, with_uv(host, requirements, uv))
    update, install = (tmp_path / "told").read_text().splitlines()
    assert update.startswith("sudo -n apt-get ")
    assert update.endswith(" update")
    assert install.startswith("sudo -n env DEBIAN_FRONTEND=noninteractive apt-get ")
    assert install.endswith(" install git odd name")


@pytest.fixture(scope="module")
def oddly_named(tmp_path_factory: pytest.TempPathFactory) -> tuple[ShellHost, Installation]:
    """A host that is ready, in a home whose name no shell may read."""
    home = tmp_path_factory.mktemp("odd") / 'it\'s $HOME "of" `mine`! \\ 50%'
    home.mkdir()
    host = ShellHost(home)
    return host, setup(host, requirements_of(PREPARED), print)


@pytest.mark.parametrize(
    "shell",
    [
        "sh",
        "bash",
        *(pytest.param(name, marks=pytest.mark.needs(name)) for name in ("fish", "csh")),
    ],
)
def test_commands_work_in_every_login_shell(
    shell: str, oddly_named: tuple[ShellHost, Installation]
) -> None:
    found = shutil.which(shell)
    assert found is not None
    host, ready = oddly_named
    texts = [
        "it's",
        "a\nb",
        "$HOME",
        "!x",
        "\\",
        "\\n",
        '"',
        "`id`",
        "",
        "ü ~*?[",
        "%s",
        "{a,b}",
        "-x",
    ]
    code = f"import sys, json, skymagic; print(json.dumps([skymagic.__file__, {texts!r}]))"
    out = through(found, host, ready.command("timeit", "-n1", "-r1", code))
    file, back = json.loads(out.splitlines()[0])
    assert file == f"{ready.code}/skymagic/__init__.py"
    assert back == texts


def through(shell: str, host: ShellHost, command: str) -> str:
    done = subprocess.run(
        [shell, "-c", command],
        capture_output=True,
        text=True,
        check=True,
        env=host.environment(),
        cwd=host.home,
    )
    return done.stdout


@pytest.mark.needs("sshd")
def test_over_ssh_with_a_profile_that_prints(tmp_path: Path) -> None:
    with loopback(tmp_path / "hosts", 1, home="my home's") as hosts:
        for name in (".bashrc", ".profile", ".zshenv", ".cshrc"):
            (hosts[0].home / name).write_text("echo '@sky system Plan9'; echo Welcome >&2\n")
        with connected(hosts) as connection:
            ready = setup(connection, requirements_of(PREPARED), print)
            assert ready.facts.system == os.uname().sysname
            assert ready.facts.home == str(hosts[0].home)
            process = connection.open(ready.command("timeit", "-n1", "-r1", "print('ä b')"))
            assert process.read().startswith("ä b\n".encode())
            process.close()


@contextmanager
def connected(hosts: Hosts) -> Iterator[HostConnection]:
    connection = connect(SshConfig(hosts.config).endpoint(HostSpec("h1", "h1")))
    try:
        yield connection
    finally:
        connection.close()


@pytest.mark.needs("sshd")
@pytest.mark.parametrize("what", ["stop button", "connection lost"])
def test_over_ssh_nothing_half_made_stays(what: str, tmp_path: Path, uv: str) -> None:
    """A stopped setup or a lost connection leaves no process and no environment."""

    def act(text: str) -> None:
        if text.startswith("running") and what == "stop button":
            raise KeyboardInterrupt
        if text.startswith("running"):
            hosts[0].kill_sessions()

    with loopback(
        tmp_path / "hosts", 1, env={"PIP_NO_INDEX": "1"}
    ) as hosts:  # which at its end looks for processes
        share_code(hosts[0].home)
        requirements = replace(SMALL, commands=("exec sleep 1000",))
        with connected(hosts) as connection, pytest.raises((HostError, KeyboardInterrupt)):
            setup(connection, requirements, act, with_uv(connection, requirements, uv))
        psutil.wait_procs(hosts[0].processes(), timeout=10)
        assert hosts[0].processes() == []
        folder = hosts[0].home / ".skymagic"
        assert [path.name for path in folder.glob("env/*") if path.suffix != ".lock"] == []
        assert list(folder.glob("incoming/*")) == []


# ------------------------------------------------------------------------------------------- hostile hosts


@pytest.mark.needs("mounts")
def test_a_read_only_home(home: Path) -> None:
    with apart(home, 'mount -t tmpfs -o ro none "$HOME"') as host:
        text = refused(host)
        assert "Read-only file system" in text
        assert "--env SKYMAGIC_HOME=" in text
        image = PREPARED.replace(env={"SKYMAGIC_HOME": f"{home.parent}/else where"})
        assert (
            setup(host, requirements_of(image), print).facts.folder == f"{home.parent}/else where"
        )


@pytest.mark.needs("mounts")
def test_a_home_where_nothing_can_be_run(home: Path) -> None:
    with apart(home, 'mount -t tmpfs -o noexec none "$HOME"') as host:
        assert re.search(f"{home} .*noexec", refused(host))


@pytest.mark.needs("mounts")
def test_a_full_disk(home: Path, cache: Path) -> None:
    with apart(home, 'mount -t tmpfs -o size=45m none "$HOME"') as host:
        assert "nearly full: 47.2 MB free" in refused(host)
        facts = replace(with_uv(host, SMALL, None), disk_kb=None)
        text = refused(host, facts=facts)
        assert "unpacking uv failed" in text
        assert re.search(r"\bdisk\b", text)
        host.run("cd; dd if=/dev/zero of=fill bs=4k")
        assert re.search(r"\bdisk\b", refused(host))


@pytest.mark.needs("mounts")
def test_a_machine_with_nothing_that_makes_environments(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no Python and no uv, and there is no uv for its platform to upload."""
    (tmp_path / "bin").mkdir()
    uname = tmp_path / "bin/uname"
    uname.write_text(
        '#!/bin/sh\nif [ "$1" = -m ]; then echo vax; else exec /usr/bin/uname "$@"; fi\n'
    )
    uname.chmod(0o755)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    hide = "for one in /usr/bin/python3* /usr/local/bin/python3*; do [ ! -e $one ] || mount --bind /dev/null $one; done"
    with apart(home, hide) as host:
        host.env = {"PATH": f"{tmp_path}/bin:/usr/bin:/bin"}
        text = refused(host)
    assert "(Linux vax)" in text
    assert "sky.Image(python='/path/to/bin/python')" in text


@pytest.mark.needs("mounts")
def test_without_shared_memory(home: Path) -> None:
    with apart(home, "mount -t tmpfs -o ro none /dev/shm") as host:
        assert probe(host, SMALL).shm_kb is None
    shared = probe(ShellHost(home), SMALL).shm_kb
    assert (shared is not None) == os.access("/dev/shm", os.W_OK)


def test_wrong_clock_is_reported(used_home: Path, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    date = tmp_path / "bin/date"
    date.write_text('#!/bin/sh\n[ "$*" = +%s ] || exit 1\necho $(($(/bin/date +%s) - 3600))\n')
    date.chmod(0o755)
    told: list[str] = []
    host = ShellHost(used_home, env={"PATH": f"{tmp_path}/bin:{PATH}"})
    assert setup(host, requirements_of(PREPARED), told.append).python == sys.executable
    assert any("60 minutes behind" in message for message in told)


def test_a_shell_that_is_none(home: Path) -> None:
    with raises(HostError, "setup", "ssh box /bin/sh -c uname"):
        probe(ShellHost(home, wrapper=("echo",)), SMALL)


# ------------------------------------------------------------------------------------------ ends and locks


NO_INDEX = {"PIP_NO_INDEX": "1"}


def test_two_at_once_make_one_environment(home: Path, tmp_path: Path, uv: str) -> None:
    share_code(home)
    begun, waits = threading.Event(), threading.Event()
    go = tmp_path / "go"
    requirements = replace(
        SMALL, commands=(f"until [ -e {go} ]; do sleep 0.05; done; echo x >>$HOME/runs",)
    )
    hosts = ShellHost(home, env=NO_INDEX), ShellHost(home, env=NO_INDEX)
    facts = [with_uv(host, requirements, uv) for host in hosts]
    with ThreadPoolExecutor() as pool:

        def said(text: str, any_shell_word: str, event: threading.Event) -> None:
            if any_shell_word in text:
                event.set()

        first = pool.submit(
            setup, hosts[0], requirements, lambda text: said(text, "running", begun), facts[0]
        )
        assert begun.wait(60)
        second = pool.submit(
            setup, hosts[1], requirements, lambda text: said(text, "waiting", waits), facts[1]
        )
        assert waits.wait(60)
        assert not probe(hosts[0], requirements).ready
        go.touch()
        assert first.result(60).python == second.result(60).python
    assert hosts[0].run("cat $HOME/runs").out == "x\n"
    assert left_on(hosts[0]) == [facts[0].env]


@pytest.mark.needs("mounts")
def test_setup_without_flock(home: Path, uv: str) -> None:
    share_code(home)
    with apart(home, "mount --bind /dev/null $(command -v flock)") as host:
        host.env = NO_INDEX
        ready = setup(host, SMALL, print, with_uv(host, SMALL, uv))
        assert probe(host, SMALL).ready
    assert Path(ready.python).exists()


@pytest.mark.parametrize("status", [1, 69, 71], ids=["busybox", "ENOLCK", "other"])
def test_setup_on_a_file_system_without_locks(
    status: int, home: Path, tmp_path: Path, uv: str
) -> None:
    share_code(home)
    (tmp_path / "bin").mkdir()
    flock = tmp_path / "bin/flock"
    flock.write_text(f"#!/bin/sh\necho flock: 9: No locks available >&2\nexit {status}\n")
    flock.chmod(0o755)
    host = ShellHost(home, env={**NO_INDEX, "PATH": f"{tmp_path}/bin:{os.environ['PATH']}"})
    setup(host, SMALL, print, with_uv(host, SMALL, uv))
    assert probe(host, SMALL).ready


@pytest.mark.parametrize("what", ["all of it", "its shell", "nobody listens"])
def test_interrupted_setup_is_repeated(what: str, home: Path, tmp_path: Path, uv: str) -> None:
    share_code(home)
    host, go = ShellHost(home, env=NO_INDEX), tmp_path / "go"
    requirements = replace(
        SMALL, commands=(f'echo x >>"$VIRTUAL_ENV/half"; [ -e {go} ] || exec sleep 1000',)
    )
    facts = with_uv(host, requirements, uv)
    session: list[psutil.Process] = []

    def act(text: str) -> None:
        """Called when the command is about to run."""
        if not text.startswith("running"):
            return
        assert host.child is not None
        session.extend(p for p in psutil.process_iter() if belongs(p, host.child.pid))
        if what == "nobody listens":
            raise ConnectionError
        if what == "all of it":
            os.killpg(host.child.pid, signal.SIGKILL)
        else:
            host.child.kill()
            host.child.wait()  # as sshd does; a zombie would seem alive

    with pytest.raises((HostError, ConnectionError)):
        setup(host, requirements, act, facts)
    assert len(session) > 1
    assert not psutil.wait_procs(session, timeout=10)[1]
    assert not probe(host, requirements).ready
    if what == "nobody listens":
        assert left_on(host) == []
    go.touch()
    ready = setup(host, requirements, print, facts)
    assert probe(host, requirements).ready
    assert (Path(ready.python).parent.parent / "half").read_text() == "x\n"


def belongs(process: psutil.Process, session: int) -> bool:
    try:
        return os.getsid(process.pid) == session
    except OSError:
        return False


def test_an_upload_that_is_interrupted_leaves_nothing(home: Path) -> None:
    class Interrupted(ShellHost):
        def upload(self, path: str, pieces: object, nbytes: int) -> None:
            Path(path).parent.mkdir(parents=True)
            Path(path).write_bytes(b"half")
            raise KeyboardInterrupt

    host = Interrupted(home)
    with pytest.raises(KeyboardInterrupt):
        setup(host, requirements_of(PREPARED), print)
    assert left_on(host) == []
