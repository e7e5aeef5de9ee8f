"""Hosts as they are written, what the ssh configuration says of them, and known_hosts."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skymagic.errors import RequestError
from skymagic.ssh.config import Endpoint, SshConfig
from skymagic.ssh.hostlist import HostSpec, expand
from skymagic.ssh.keys import KnownHosts
from tests.lab.golden import Golden

# --------------------------------------------------------------------------------------------------- as they are written


@pytest.mark.parametrize(
    ("word", "names"),
    [
        ("gpu1", ["gpu1"]),
        ("gpu1,gpu2", ["gpu1", "gpu2"]),
        ("gpu1,gpu1", ["gpu1", "gpu1"]),
        ("gpu[1-3]", ["gpu1", "gpu2", "gpu3"]),
        ("gpu[8-11]", ["gpu8", "gpu9", "gpu10", "gpu11"]),
        ("gpu[08-10]", ["gpu08", "gpu09", "gpu10"]),
        ("gpu[01-02,11].lab", ["gpu01.lab", "gpu02.lab", "gpu11.lab"]),
        ("r[1-2]n[1-2]", ["r1n1", "r1n2", "r2n1", "r2n2"]),
        ("a[1-2],b", ["a1", "a2", "b"]),
        ("[::1]", ["::1"]),
        (" gpu1 ", ["gpu1"]),
        ("gpu1,", ["gpu1"]),
    ],
)
def test_names(word: str, names: list[str]) -> None:
    assert [spec.name for spec in expand([word])] == names


def test_user_and_port() -> None:
    assert expand(["ubuntu@10.0.0.7:2222", "me@gpu[1-2]:22", "[fe80::1]:23", "a@b@c"]) == (
        HostSpec("ubuntu@10.0.0.7:2222", "10.0.0.7", "ubuntu", 2222),
        HostSpec("me@gpu1:22", "gpu1", "me", 22),
        HostSpec("me@gpu2:22", "gpu2", "me", 22),
        HostSpec("[fe80::1]:23", "fe80::1", None, 23),
        HostSpec("a@b@c", "c", "a@b", None),
    )


def test_a_file_of_hosts(tmp_path: Path) -> None:
    path = tmp_path / "hosts.txt"
    path.write_text("# the rack\ngpu[1-2]   # old\n\nme@gpu3 gpu4,gpu5\n")
    assert [s.text for s in expand([f"@{path}", "gpu6"])] == [
        "gpu1",
        "gpu2",
        "me@gpu3",
        "gpu4",
        "gpu5",
        "gpu6",
    ]


def test_all_mistakes_at_once(golden: Golden, tmp_path: Path) -> None:
    path = tmp_path / "hosts.txt"
    path.write_text("ok\nbad:port\n@other\n")
    words = [
        "gpu[3-1]",
        "a b",
        "-oProxyCommand=x",
        "x@-y",
        "h:0",
        "fe80::1",
        "n[1-99999]",
        f"@{path}",
        "@/none",
        "z[",
    ]
    with pytest.raises(RequestError) as refused:
        expand(words)
    mistakes = refused.value.mistakes
    golden(mistakes)


@pytest.mark.parametrize("words", [[], [""], [","]])
def test_no_hosts(words: list[str]) -> None:
    with pytest.raises(RequestError, match="no hosts"):
        expand(words)


def test_many_ranges_are_no_way_around_the_limit() -> None:
    with pytest.raises(RequestError, match="more than"):
        expand(["a[0-999]b[0-999]c[0-999]d[0-999]"])


SHELL = [
    "$(touch x)",
    "`touch${IFS}x`",
    "a;b",
    "a|b",
    "a&b",
    "a'b",
    'a"b',
    "a\\b",
    "a>b",
    "{a,b}",
    "a$b",
    "a\x7fb",
    "a\u200bb",
]


@pytest.mark.parametrize("name", SHELL)
def test_no_shell_reads_a_name(golden: Golden, name: str, tmp_path: Path) -> None:
    """A name goes into ProxyCommand: whoever may write a file of hosts could run commands here."""
    path = tmp_path / "hosts.txt"
    path.write_text(f"{name.replace(' ', '${IFS}')}\n")
    (tmp_path / "config").write_text(f"Host jumper\n ProxyJump {name}\n")
    for word in (name, f"{name}@host", f"@{path}"):
        if word != "a\\b@host":
            with golden.raises(RequestError):
                expand([word])
    with golden.raises(RequestError):
        SshConfig(tmp_path / "config").endpoint(expand(["jumper"])[0])


def test_a_user_of_a_windows_domain() -> None:
    assert expand(["CORP\\me@host"]) == (HostSpec("CORP\\me@host", "host", "CORP\\me"),)


@given(st.text(max_size=30))
def test_any_text_is_hosts_or_mistakes(text: str) -> None:
    try:
        specs = expand([text.lstrip("@ ")])
    except RequestError:
        return
    assert specs
    assert all(spec.name and not spec.name.startswith("-") for spec in specs)


# ------------------------------------------------------------------------------------------------------ settings


def settle(path: Path, text: str, word: str) -> Endpoint:
    path.mkdir(exist_ok=True)
    (path / "config").write_text(text)
    return SshConfig(path / "config").endpoint(expand([word])[0])


def test_explicit_settings_precede_the_configuration(tmp_path: Path) -> None:
    text = "Host gpu\n  User me\n  Port 22\n  ProxyCommand nc %h %p %r\n"
    found = settle(tmp_path, text, "you@gpu:2222")
    assert (found.user, found.port, found.proxy_command) == ("you", 2222, "nc gpu 2222 you")
    assert found.label == "you@gpu:2222"


def test_jump_hosts_have_settings_of_their_own(tmp_path: Path) -> None:
    text = """
Host gpu
  ProxyJump first,second
Host first
  HostName 10.0.0.1
  ProxyJump zero
Host second
  HostName 10.0.0.2
  ProxyJump nobody
"""
    first, second = settle(tmp_path, text, "gpu").proxy_jump
    assert (first.hostname, [jump.label for jump in first.proxy_jump]) == ("10.0.0.1", ["zero"])
    assert (second.hostname, second.proxy_jump) == ("10.0.0.2", ())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Host a\n ProxyJump b\nHost b\n ProxyJump a\n", "ProxyJump goes in a circle: a → b → a"),
        ("Host *\n Port many\n", "gives a the port 'many', which is no number"),
        ("Host a\n ProxyJump x:y:z\n", "ProxyJump of a: 'x:y:z' is not a host"),
        ("Match nonsense\n Port 3\n", "the ssh configuration cannot be read for a"),
    ],
)
def test_mistakes_in_the_configuration(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(RequestError) as refused:
        settle(tmp_path, text, "a")
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("text", "jumps", "command"),
    [
        ("Host a\n ProxyJump none\nHost *\n ProxyJump b\n", 0, None),
        ("Host a\n ProxyCommand none\nHost *\n ProxyJump b\n", 0, None),
        ("Host a\n ProxyCommand x\nHost *\n ProxyJump b\n", 0, "x"),
        ("Host a\n ProxyJump b\nHost *\n ProxyCommand x\n", 1, None),
    ],
)
def test_the_first_proxy_counts(tmp_path: Path, text: str, jumps: int, command: str | None) -> None:
    found = settle(tmp_path, text, "a")
    assert (len(found.proxy_jump), found.proxy_command) == (jumps, command)


def test_files_of_known_hosts(tmp_path: Path) -> None:
    text = 'Host a\n UserKnownHostsFile ~/.ssh/%h "/with space/k"\n GlobalKnownHostsFile none\n'
    assert settle(tmp_path, text, "a").known_hosts == (
        str(Path.home() / ".ssh" / "a"),
        "/with space/k",
    )


def test_without_a_configuration(tmp_path: Path) -> None:
    found = SshConfig(tmp_path / "none").endpoint(HostSpec("10.0.0.1", "10.0.0.1"))
    assert (found.hostname, found.port, found.proxy_jump, found.identities_given) == (
        "10.0.0.1",
        22,
        (),
        False,
    )
    assert f"{Path.home()}/.ssh/id_ed25519" in found.identities
    assert f"{Path.home()}/.ssh/known_hosts" in found.known_hosts


# --------------------------------------------------------------------------------------------------- known_hosts

KEY, OTHER = "AAAAC3NzaC1lZDI1NTE5AAAAIKey", "AAAAC3NzaC1lZDI1NTE5AAAAIOther"


def judged(tmp_path: Path, lines: str, name: str = "gpu1", key: str = KEY) -> str:
    (tmp_path / "known").write_text(lines)
    return (
        KnownHosts([str(tmp_path / "none"), str(tmp_path / "known")])
        .check((name,), "ssh-ed25519", key)
        .state
    )


@pytest.mark.parametrize(
    ("lines", "state"),
    [
        (f"gpu1 ssh-ed25519 {KEY} comment\n", "known"),
        (f"GPU1,10.0.0.1 ssh-ed25519 {KEY}\n", "known"),
        (f"gpu? ssh-ed25519 {KEY}\n", "known"),
        (f"gpu*,!gpu1 ssh-ed25519 {KEY}\n", "unknown"),
        (f"[gpu1]:2222 ssh-ed25519 {KEY}\n", "unknown"),
        (f"gpu11 ssh-ed25519 {KEY}\n", "unknown"),
        (f"gpu1 ssh-ed25519 {OTHER}\n", "changed"),
        (f"gpu1 ssh-rsa {OTHER}\n", "changed"),
        (f"gpu1 ssh-ed25519 {OTHER}\ngpu1 ssh-ed25519 {KEY}\n", "known"),
        (f"gpu1 ssh-ed25519 {KEY}\n@revoked * ssh-ed25519 {KEY}\n", "revoked"),
        (f"@cert-authority * ssh-ed25519 {KEY}\n", "unknown"),
        (
            f"# gpu1 ssh-ed25519 {KEY}\n\ngpu1\n|1|x|y ssh-ed25519 {KEY}\n|2|a ssh-ed25519 {KEY}\n",
            "unknown",
        ),
        ("", "unknown"),
    ],
)
def test_verdicts(tmp_path: Path, lines: str, state: str) -> None:
    assert judged(tmp_path, lines) == state
