"""Downloads once per pool: one host of a kind makes an environment from its index, and the others get it from there."""

from __future__ import annotations

import base64
import contextlib
import ensurepip
import gzip
import os
import re
import shlex
import shutil
import signal
import threading
import zipfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from operator import attrgetter
from pathlib import Path
from urllib.parse import quote

import pytest

from skymagic.bootstrap import wheel
from skymagic.bootstrap.builds import TORCH_INDEX, download_bytes
from skymagic.bootstrap.facts import HostFacts, PlannedWheel, Python
from skymagic.bootstrap.provision import probe
from skymagic.bootstrap.requirements import Requirements
from skymagic.bootstrap.wheelhouse import uv_for
from skymagic.content.remote import bare_hosts
from skymagic.errors import HostError
from skymagic.providers import environment_copy
from skymagic.providers.environment_copy import HostPlan, groups
from skymagic.providers.ssh import Machine, set_up
from skymagic.ssh.config import Endpoint, SshConfig
from skymagic.ssh.connecting import connect
from skymagic.ssh.host import HostConnection
from skymagic.ssh.hostlist import HostSpec
from tests.lab.hosts import Hosts, loopback
from tests.lab.shells import MINOR, SMALL, kept_folder
from tests.lab.waiting import until
from tests.lab.wheels import make_wheel, served

HOST = HostFacts(
    system="Linux", machine="x86_64", hostname="n", home="/h", folder="/h/s", libc="glibc 2.36", boot="b", indexes=1,
    addresses=(("eth0", "10.0.0.1"),), pythons=(Python(MINOR, "/usr/bin/python3"),), uv="/usr/bin/uv",
)  # fmt: skip


def test_new_environment_lists_its_downloads() -> None:
    """Sizes reported by indexes, otherwise estimates; nothing for files on a disk."""
    wanted = replace(SMALL, packages=("numpy==2", "pandas==3", "tiny==1"))
    planned = (
        PlannedWheel("numpy", "2", nbytes=70_000_000, source="pypi.org"),
        PlannedWheel("pandas", "3", source="mirror"),
        PlannedWheel("tiny", "1", nbytes=900_000_000, source="/opt/wheels"),
    )
    assert download_bytes(wanted, replace(HOST, planned=planned)) == 72_000_000
    assert download_bytes(wanted, replace(HOST, planned=planned[2:])) == 0
    assert download_bytes(wanted, HOST) == 0, "nothing is known of its sources"
    torch = replace(SMALL, packages=("torch==2.13.0",))
    build = PlannedWheel("torch", "2.13.0+cu126", source="download.pytorch.org")
    gpu = replace(HOST, gpus=("A100",), driver="550.1", planned=(build,))
    assert download_bytes(torch, gpu) == 800_000_000


def test_which_hosts_pass_on() -> None:
    """Equal hosts that can reach each other, if it saves time."""
    wanted = replace(SMALL, packages=("numpy==2",))
    large = (PlannedWheel("numpy", "2", nbytes=70_000_000, source="pypi.org"),)

    def grouped(
        *hosts: HostFacts, requirements: Requirements = wanted, alone: bool = False
    ) -> list[list[str]]:
        pythons = ("".join(python.path for python in each.pythons[:1]) for each in hosts)
        targets = [
            HostPlan(str(n), None, *each)  # type: ignore[arg-type]
            for n, each in enumerate(zip(hosts, pythons, strict=True))
        ]
        found = [
            [each.name for each in group] for group in groups(targets, requirements, alone=alone)
        ]
        assert sorted(sum(found, [])) == [str(n) for n in range(len(hosts))]
        return [group for group in found if len(group) > 1]

    good = replace(HOST, planned=large)
    assert grouped(good, good, good) == [["0", "1", "2"]]
    assert grouped(good, good, alone=True) == []
    assert grouped(good) == []
    assert grouped(HOST, HOST) == [], "nothing large is known to be downloaded"
    arm = replace(good, machine="aarch64")
    assert grouped(good, arm, good, arm, replace(good, machine="riscv64")) == [
        ["0", "2"],
        ["1", "3"],
    ]
    assert grouped(good, replace(good, env="elsewhere"), good) == [["0", "2"]]
    assert grouped(good, replace(good, ready=True), good) == [["0", "2"]]
    without = replace(good, indexes=0)
    assert grouped(good, without, good, without, alone=False) == [["0", "2"], ["1", "3"]]
    assert grouped(good, without, good, without, alone=True) == [["1", "3"]], (
        "the notebook's link is always shared"
    )
    assert grouped(good, replace(good, pythons=()), good) == [["0", "2"]]
    assert grouped(good, replace(good, disk_kb=250_000), good) == [["0", "2"]]
    far = replace(good, boot="c", addresses=(("eth0", "8.8.8.8"),))
    assert grouped(far, replace(far, boot="d", addresses=(("eth0", "9.9.9.9"),))) == []
    assert grouped(good, good, requirements=replace(wanted, python="/opt/python")) == []
    scoped = replace(wanted, scoped=(("https://own/simple", ("numpy",)),))
    assert grouped(good, good, requirements=scoped) == [], "one lock has one order of indexes"
    assert grouped(without, without, requirements=scoped) == [["0", "1"]]


class Login:
    """Who may ask an index: one user, with a password. While somebody asks, no command line of this machine may show it."""

    def __init__(self) -> None:
        user, password = "reader", "hush-hush@7"
        self.words = f"{user}:{quote(password, safe='')}"
        self.header = f"Basic {base64.b64encode(f'{user}:{password}'.encode()).decode()}"
        self.secrets = [b"hush-hush", self.header.removeprefix("Basic ").encode()]
        self.commands: set[bytes] = set()

    def __call__(self, authorization: str) -> bool:
        for each in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):  # it has ended
                self.commands.add(each.read_bytes())
        return authorization == self.header

    def to(self, url: str) -> str:
        return url.replace("://", f"://{self.words}@")

    def shown_in(self, data: bytes) -> bool:
        return any(secret in data for secret in self.secrets)


@dataclass
class Lab:
    """Hosts whose own index, and another one that the notebook names, count, and ask for a password."""

    hosts: Hosts
    folder: Path
    wanted: Requirements
    asked: list[str]
    login: Login
    endpoints: list[Endpoint] = field(default_factory=list)
    connections: list[HostConnection] = field(default_factory=list)
    facts: list[HostFacts] = field(default_factory=list)

    def wheels(self) -> list[str]:
        return sorted(path.name for path in self.folder.rglob("*.whl"))

    def shown(self, told: Iterable[str]) -> list[str]:
        """Where the password stands: in what was said, on command lines, in what the hosts keep."""
        commands = [
            each.decode(errors="replace")
            for each in self.login.commands
            if self.login.shown_in(each)
        ]
        files = (path for host in self.hosts for path in host.home.rglob("*") if path.is_file())
        kept = [str(path) for path in files if self.login.shown_in(path.read_bytes())]
        return [*commands, *kept, *(line for line in told if self.login.shown_in(line.encode()))]

    def leftovers(self) -> list[str]:
        return [str(path) for host in self.hosts for path in host.home.glob(".skymagic/incoming/*")]

    def forget(self, *more: str) -> None:
        """Let no host have an environment, nor the packages in uv's cache."""
        for host in self.hosts:
            for part in (".cache/uv", ".skymagic/env", *more):
                shutil.rmtree(host.home / part, ignore_errors=True)

    def set_up(
        self, told: list[str], *facts: HostFacts, wanted: Requirements | None = None
    ) -> list[Machine]:
        """A start of the first hosts, which are as `facts` say."""
        known = zip(self.endpoints, self.connections, facts or self.facts, strict=False)
        machines = [Machine(*each) for each in known]
        set_up(machines, wanted or self.wanted, told.append)
        return machines

    def has(self, number: int, name: str) -> bool:
        return bool(
            [
                *self.hosts[number].home.glob(
                    f".skymagic/env/*/lib/python*/site-packages/{name}-*.dist-info"
                )
            ]
        )


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Iterator[Lab]:
    """Three hosts with uv, from empty homes; their index has pip and a package, and the notebook's has another one."""
    folder = tmp_path_factory.mktemp("passing")
    index = folder / "index"
    private = index / "private"
    large = make_wheel(private, "tiny-large", "1.0", ["tiny-more"])
    with zipfile.ZipFile(large, "a") as archive:
        archive.writestr("tiny_large.bin", os.urandom(20_000_000))
    make_wheel(index, "tiny-more", "2.0")
    for bundled in Path(ensurepip.__file__).parent.glob("_bundled/pip-*.whl"):
        shutil.copy(bundled, index)
    asked: list[str] = []
    login = Login()
    with contextlib.ExitStack() as stack:
        patches = stack.enter_context(pytest.MonkeyPatch.context())
        patches.setattr(environment_copy, "WORTH_BYTES", 1)
        patches.setenv("XDG_CACHE_HOME", str(kept_folder(pytestconfig, "uv")))
        here = os.uname()
        program = gzip.decompress(uv_for(replace(HOST, system=here.sysname, machine=here.machine)))
        url, more = (
            login.to(stack.enter_context(served(each, asked, admits=login)))
            for each in (index, private)
        )
        wanted = replace(SMALL, packages=("tiny-large==1.0",), indexes=(more,))
        env = {
            "PIP_CONFIG_FILE": "/dev/null",
            "PIP_INDEX_URL": url,
            "PIP_FIND_LINKS": "",
            "PIP_EXTRA_INDEX_URL": "",
        }
        hosts = stack.enter_context(loopback(folder / "hosts", 3, env=env))
        for host in hosts:
            (host.home / ".local/bin").mkdir(parents=True)
            (host.home / ".local/bin/uv").write_bytes(program)
            (host.home / ".local/bin/uv").chmod(0o700)
        made = Lab(hosts, index, wanted, asked, login)
        planned = (PlannedWheel("tiny-large", "1.0", source="127.0.0.1"),)
        config = SshConfig(hosts.config)
        for name in hosts.names:
            connection = connect(config.endpoint(HostSpec(name, name)))
            stack.callback(connection.close)
            made.endpoints.append(config.endpoint(HostSpec(name, name)))
            made.connections.append(connection)
            made.facts.append(replace(probe(connection, wanted), planned=planned))
        yield made


@pytest.mark.needs("sshd")
def test_one_host_fetches_and_others_copy(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three hosts request each wheel once; their environments are as if each had downloaded it."""
    told: list[str] = []
    uploads: list[tuple[str, str]] = []
    upload = HostConnection.upload

    def counted(self: HostConnection, path: str, chunks: Iterable[memoryview], nbytes: int) -> None:
        uploads.append((self.label, Path(path).name))
        upload(self, path, chunks, nbytes)

    monkeypatch.setattr(HostConnection, "upload", counted)
    made = lab.set_up(told)
    assert [each for each in uploads if each[1] != "server.pyz"] == [
        ("h1", wheel.running_wheel()[1])
    ], f"the code comes once, and goes on from host to host: {told}"
    known = [probe(each, lab.wanted) for each in lab.connections]
    assert [each.without_index for each in known] == [False] * 3, (
        "later packages come from their index"
    )
    assert [(each.ready, each.code) for each in known] == [(True, True)] * 3
    assert sorted(lab.asked) == lab.wheels()
    assert all(lab.has(n, name) for n in range(3) for name in ("tiny_large", "tiny_more", "pip"))
    assert lab.leftovers() == []
    assert any(line.startswith("h1 ") and line.endswith(" h2, h3") for line in told)
    for each, host in zip(made, lab.hosts, strict=True):
        say = "import sys, tiny_large; from pip import main; print(sys.prefix, tiny_large.__version__)"
        python = f"{host.home}/.skymagic/env/{each.facts.env}/bin/python"
        done = lab.connections[made.index(each)].run(
            f"{python} -c {shlex.quote(say)}; {python[:-6]}pip --version"
        )
        assert done.out.startswith(f"{host.home}/.skymagic/env/{each.facts.env} 1.0\npip "), (
            done.err
        )
        assert f" from {host.home}/" in done.out
    assert lab.shown(told) == []
    assert any(b"pip\0compile" in each for each in lab.login.commands), "somebody has looked"


@pytest.mark.needs("sshd")
def test_a_host_that_cannot_take_part(lab: Lab) -> None:
    """It downloads its own packages, and the others do not wait for it."""
    told: list[str] = []
    lab.forget()
    broken = lab.hosts[1].home / "python"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o700)
    unlike = replace(lab.facts[1], pythons=(Python(MINOR, str(broken)),))
    with pytest.raises(HostError, match="h2: .*making an environment"):
        lab.set_up(told, lab.facts[0], unlike, lab.facts[2])
    assert any(re.match(r"h2: .*\bh1;", line) for line in told)
    assert lab.has(0, "tiny_large")
    assert lab.has(2, "tiny_large")
    assert lab.leftovers() == []


@pytest.mark.needs("sshd")
def test_package_missing_in_the_index_leaves_nothing(lab: Lab) -> None:
    """The first host reports the problem, and nothing is copied."""
    told: list[str] = []
    lab.forget()
    wanted = replace(lab.wanted, packages=("tiny-large==1.0", "tiny-more==7"))
    # else pip would ask for each package there, too, many times where it cannot be reached
    cut_off = [replace(each, silent=((TORCH_INDEX, "no route"),)) for each in lab.facts[:2]]
    with pytest.raises(HostError, match=r"(?s)h1: .*tiny-more==7") as raised:
        lab.set_up(told, *cut_off, wanted=wanted)
    assert lab.leftovers() == []
    assert lab.shown([*told, str(raised.value)]) == []


@pytest.mark.needs("sshd")
def test_an_interrupt_leaves_nothing(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, during and after the copy; the next start works."""
    told: list[str] = []
    lab.forget()
    for step in ("archive", "BareHosts.share", "BareHosts._place", "BareHosts._clean"):
        called, once = attrgetter(step)(bare_hosts), threading.Semaphore(1)

        def pressed(
            *args: object, called: Callable[..., object] = called, once: threading.Semaphore = once
        ) -> object:
            if once.acquire(blocking=False):
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            return called(*args)

        with monkeypatch.context() as patches:
            patches.setattr(f"{bare_hosts.__name__}.{step}", pressed)
            with pytest.raises(KeyboardInterrupt):
                lab.set_up(told, *lab.facts[:2])
        until(lambda: lab.leftovers() == [])  # the first host goes on until its connection ends
        shutil.rmtree(lab.hosts[0].home / ".skymagic/env")
    lab.set_up(told, *lab.facts[:2])
    assert all(lab.has(n, "tiny_large") for n in range(2))


@pytest.mark.needs("sshd")
def test_two_pools_at_once(lab: Lab) -> None:
    """One creates the environments, and the other waits."""
    lab.forget(".skymagic/code")
    told: list[list[str]] = [[], []]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda lines: lab.set_up(lines, *lab.facts[:2]), told))
    assert all(lab.has(n, "tiny_large") for n in range(2))
    assert lab.leftovers() == []


@pytest.mark.needs("sshd")
def test_hosts_that_share_a_home(lab: Lab) -> None:
    """An environment created by one of them exists for all."""
    lab.forget(".skymagic/code")
    told: list[str] = []
    machines = [
        Machine(replace(lab.endpoints[0], label=name), lab.connections[0], lab.facts[0])
        for name in ("a", "b")
    ]
    set_up(machines, lab.wanted, told.append)
    assert lab.has(0, "tiny_large")
    assert lab.leftovers() == []
    assert not [line for line in told if "could not" in line]
