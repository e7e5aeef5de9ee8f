"""Downloads once per pool: one host of a kind fetches wheels from its index, and the others get them from it."""

from __future__ import annotations

import base64
import contextlib
import ensurepip
import gzip
import os
import shutil
import signal
import threading
import zipfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from urllib.parse import quote

import pytest

from skymagic.bootstrap import uv, wheel
from skymagic.bootstrap.facts import Facts, Offer, Python
from skymagic.bootstrap.listing import download_bytes
from skymagic.bootstrap.provision import probe, setup
from skymagic.bootstrap.remote import Installation
from skymagic.bootstrap.requirements import Requirements
from skymagic.providers import chain, passing
from skymagic.providers.chain import Target, discard
from skymagic.providers.passing import groups, passed_on
from skymagic.providers.ssh import side_by_side
from skymagic.ssh.config import SshConfig
from skymagic.ssh.connecting import connect
from skymagic.ssh.connection import Connection
from skymagic.ssh.hostlist import HostSpec
from tests.lab.hosts import Hosts, loopback
from tests.lab.shells import MINOR, SMALL, kept_folder
from tests.lab.wheels import make_wheel, served

HOST = Facts(
    system="Linux", machine="x86_64", hostname="n", home="/h", folder="/h/s", libc="glibc 2.36", boot="b", indexes=1,
    addresses=(("eth0", "10.0.0.1"),), pythons=(Python(MINOR, "/usr/bin/python3"),), uv="/usr/bin/uv",
)  # fmt: skip


def test_what_a_new_environment_downloads() -> None:
    """Sizes that indexes tell, guesses where they do not, and nothing for what lies on the host's own disk."""
    wanted = replace(SMALL, packages=("numpy==2", "pandas==3", "tiny==1"))
    offers = (
        Offer("numpy", "2", nbytes=70_000_000, source="https://pypi.org/simple"),
        Offer("pandas", "3", source="http://mirror/simple"),
        Offer("tiny", "1", nbytes=900_000_000, source="/opt/wheels"),
    )
    assert download_bytes(wanted, replace(HOST, offers=offers)) == 72_000_000
    assert download_bytes(wanted, replace(HOST, offers=offers, uv=None)) == 92_000_000
    assert download_bytes(wanted, replace(HOST, offers=offers[2:], uv=None)) == 0
    torch = replace(SMALL, packages=("torch==2.13.0",))
    assert download_bytes(torch, replace(HOST, gpus=("A100",), driver="550.1")) == 800_000_000


def test_which_hosts_pass_on() -> None:
    """Those of one kind, which reach each other, where it is worth the trouble."""
    wanted = replace(SMALL, packages=("numpy==2",))
    large = (Offer("numpy", "2", nbytes=70_000_000, source="https://pypi.org/simple"),)

    def grouped(*hosts: Facts, requirements: Requirements = wanted) -> list[list[str]]:
        targets = [Target(str(n), None, each, "/usr/bin/python3") for n, each in enumerate(hosts)]  # type: ignore[arg-type]
        return [[each.name for each in group] for group in groups(targets, requirements)]

    good = replace(HOST, offers=large)
    assert grouped(good, good, good) == [["0", "1", "2"]]
    assert grouped(good) == []
    assert grouped(HOST, HOST) == [], "nothing large is known to be downloaded"
    arm = replace(good, machine="aarch64")
    assert grouped(good, arm, good, arm, replace(good, machine="riscv64")) == [["0", "2"], ["1", "3"]]
    assert grouped(good, replace(good, ready=True), good) == [["0", "2"]]
    assert grouped(good, replace(good, indexes=0), good) == [["0", "2"]]
    assert grouped(good, replace(good, pythons=()), good) == [["0", "2"]]
    assert grouped(good, replace(good, disk_kb=250_000), good) == [["0", "2"]]
    far = replace(good, boot="c", addresses=(("eth0", "8.8.8.8"),))
    assert grouped(far, replace(far, boot="d", addresses=(("eth0", "9.9.9.9"),))) == []
    for unlike in (
        replace(wanted, commands=("pip install x",)),
        replace(wanted, files=(("/x/a.tar.gz", "d"),)),
        replace(wanted, scoped=(("https://own/simple", ("numpy==2",)),)),
        replace(wanted, python="/opt/python"),
    ):
        assert grouped(good, good, requirements=unlike) == []


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
    targets: list[Target] = field(default_factory=list)

    def wheels(self) -> list[str]:
        return sorted(path.name for path in self.folder.rglob("*.whl"))

    def shown(self, told: Iterable[str]) -> list[str]:
        """Where the password stands: in what was said, on command lines, in what the hosts keep."""
        commands = [each.decode(errors="replace") for each in self.login.commands if self.login.shown_in(each)]
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

    def set_up(self, targets: list[Target], told: list[str]) -> list[Installation]:
        """Pass on, and install from what is passed on."""
        with passed_on(targets, self.wanted, told.append) as sent:
            assert sorted(sent) == [each.name for each in targets], told
            return side_by_side(
                lambda each: setup(each.host, self.wanted, told.append, each.facts, sent[each.name]), targets
            )

    def has(self, number: int, name: str) -> bool:
        return bool([*self.hosts[number].home.glob(f".skymagic/env/*/lib/python*/site-packages/{name}-*.dist-info")])


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
        patches.setattr(passing, "WORTH_BYTES", 1)
        patches.setenv("XDG_CACHE_HOME", str(kept_folder(pytestconfig, "uv")))
        here = os.uname()
        program = gzip.decompress(uv.fetch(replace(HOST, system=here.sysname, machine=here.machine)))
        url, more = (login.to(stack.enter_context(served(each, asked, admits=login))) for each in (index, private))
        wanted = replace(SMALL, packages=("tiny-large==1.0",), indexes=(more,))
        env = {"PIP_CONFIG_FILE": "/dev/null", "PIP_INDEX_URL": url, "PIP_FIND_LINKS": "", "PIP_EXTRA_INDEX_URL": ""}
        hosts = stack.enter_context(loopback(folder / "hosts", 3, env=env))
        for host in hosts:
            (host.home / ".local/bin").mkdir(parents=True)
            (host.home / ".local/bin/uv").write_bytes(program)
            (host.home / ".local/bin/uv").chmod(0o700)
        made = Lab(hosts, index, wanted, asked, login)
        config = SshConfig(hosts.config)
        for name in hosts.names:
            connection = connect(config.endpoint(HostSpec(name, name)))
            stack.callback(connection.close)
            facts = probe(connection, wanted, True)
            made.targets.append(Target(name, connection, facts, facts.pythons[0].path))
        yield made


@pytest.mark.needs("sshd")
def test_a_host_that_cannot_take_part(lab: Lab) -> None:
    told: list[str] = []
    unlike = [lab.targets[0], replace(lab.targets[1], python="/nowhere/python"), lab.targets[2]]
    with passed_on(unlike, lab.wanted, told.append) as sent:
        assert sorted(sent) == ["h1", "h3"]
        discard([(each, sent[each.name].incoming) for each in lab.targets if each.name in sent])
    assert told[-1] == "h2: the packages do not get through from the other hosts; downloading them there"
    assert lab.leftovers() == []


@pytest.mark.needs("sshd")
def test_what_the_index_lacks_leaves_nothing(lab: Lab) -> None:
    """The ordinary way says what is wrong, with its remedies."""
    told: list[str] = []
    with passed_on(lab.targets, replace(lab.wanted, packages=("tiny-large==1.0", "tiny-more==7")), told.append) as sent:
        assert sent == {}
    assert "each downloads its own (h1: it cannot be set up: choosing versions with uv failed" in told[-1]
    assert "tiny-more==7" in told[-1]
    assert lab.leftovers() == []
    assert lab.shown(told) == []


@pytest.mark.needs("sshd")
@pytest.mark.parametrize(("module", "step"), [(passing, "upload"), (chain, "asked")])
def test_an_interrupt_leaves_nothing(lab: Lab, module: ModuleType, step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the first host is asked to choose, and while mirrors begin; the next start (below) works."""
    called, once = getattr(module, step), threading.Semaphore(1)

    def pressed(*args: object) -> object:
        if once.acquire(blocking=False):
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        return called(*args)

    monkeypatch.setattr(module, step, pressed)
    with pytest.raises(KeyboardInterrupt), passed_on(lab.targets, lab.wanted, print):
        raise AssertionError("nobody has pressed")
    assert lab.leftovers() == []


@pytest.mark.needs("sshd")
def test_hosts_without_uv(lab: Lab) -> None:
    """The first gets it from its index, once, and passes it on like the rest."""
    program = lab.hosts[0].home / ".local/bin/uv"
    made = make_wheel(lab.folder, "uv", "1.0")
    with zipfile.ZipFile(made, "a") as archive:
        archive.write(program, "uv-1.0.data/scripts/uv")
    lab.forget()
    lab.asked.clear()
    told: list[str] = []
    lab.set_up([replace(each, facts=replace(each.facts, uv=None)) for each in lab.targets[:2]], told)
    assert all(lab.has(n, name) for n in range(2) for name in ("uv", "pip", "tiny_large"))
    assert sorted(lab.asked) == lab.wheels()
    assert lab.shown(told) == []
    made.unlink()


@pytest.mark.needs("sshd")
def test_one_host_fetches_and_the_others_get_it_from_there(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each wheel is asked of the index once, for three hosts; their environments are as if each had downloaded."""
    told: list[str] = []
    lab.forget(".skymagic/code")
    lab.asked.clear()
    uploads: list[tuple[str, str]] = []
    upload = Connection.upload

    def counted(self: Connection, path: str, chunks: Iterable[memoryview], nbytes: int) -> None:
        uploads.append((self.label, Path(path).name))
        upload(self, path, chunks, nbytes)

    monkeypatch.setattr(Connection, "upload", counted)
    made = lab.set_up(lab.targets, told)
    assert uploads == [("h1", wheel.running()[1])], "the code comes once, and goes on from host to host"
    assert [each.facts.without_index for each in made] == [False] * 3, "later packages come from their index"
    assert sorted(lab.asked) == lab.wheels()
    assert all(lab.has(n, name) for n in range(3) for name in ("tiny_large", "tiny_more", "pip"))
    assert lab.leftovers() == []
    assert not probe(lab.targets[1].host, lab.wanted).without_index
    assert told[0].startswith("h1 fetches the packages (about ")
    assert told[0].endswith("), and passes them on to h2, h3")
    # what uv keeps of a mirror is known again in the next start
    lab.asked.clear()
    for host in lab.hosts:
        shutil.rmtree(host.home / ".skymagic/env")
    lab.set_up(lab.targets, told)
    assert lab.asked == []
    assert lab.shown(told) == []
    assert any(b"pip\0install" in each for each in lab.login.commands), "somebody has looked"


@pytest.mark.needs("sshd")
def test_two_pools_at_once(lab: Lab) -> None:
    """Each has mirrors of its own; one makes the environments, and the other waits for it."""
    lab.forget(".skymagic/code")
    told: list[list[str]] = [[], []]
    with ThreadPoolExecutor(2) as pool:
        made = list(pool.map(partial(lab.set_up, lab.targets), told))
    assert [each.python for each in made[0]] == [each.python for each in made[1]]
    assert all(lab.has(n, "tiny_large") for n in range(3))
    assert lab.leftovers() == []
