"""What a host says reaches no terminal as anything but text: a login shell that prints escapes, agents' records, ranks' logs."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import unicodedata
from pathlib import Path

import pytest

from skymagic.bootstrap.facts import parse
from skymagic.errors import CloudError, FilesError, HostError, PackagesError, PoolError
from skymagic.wire.untrusted import print_sanitized, sanitized, sanitized_line
from tests.lab.hosts import loopback
from tests.lab.notebook import opened
from tests.lab.places import home_that_knows

HOSTILE = {
    "carriage return": "refused\rwelcome",
    "title (OSC)": "\x1b]0;owned\x07",
    "clipboard (OSC 52, ST)": "\x1b]52;c;cm0gLXJmIH4=\x1b\\",
    "erased screen (CSI)": "\x1b[2J\x1b[H",
    "C1 CSI": "\x9b2J",
    "C1 OSC": "\x9d0;owned\x9c",
    "device control (DCS)": "\x1bP$q\x1b\\",
    "backspaces": "no\b\bok",
    "bell, shift out, delete": "\x07\x0e\x7f",
    "bidi override": "\u202egnp.exe",
    "bidi isolate": "\u2066a\u2069",
    "bidi mark": "a\u200f\u061cb",
    "line separator": "a\u2028b",
    "half a colour": "\x1b[3",
}


def harmless(text: str) -> bool:
    """Whether nothing in a text is more than text, line ends and tabs."""
    return all(
        letter in "\n\t" or letter.isprintable() or unicodedata.category(letter) == "Zs"
        for letter in text
    )


@pytest.mark.parametrize("name", HOSTILE)
def test_nothing_hostile_stays(name: str) -> None:
    text = HOSTILE[name]
    assert not harmless(text)
    assert harmless(sanitized(f"one\n{text}\ttwo"))
    assert sanitized(sanitized(text)) == sanitized(text)
    assert "\n" not in sanitized_line(f"{text}\n\t")
    assert harmless(sanitized_line(text))
    for error in (PoolError, PackagesError, FilesError):
        assert harmless(str(error(text)))
    refused = HostError(f"h1{text}", text, text)
    assert harmless(str(refused) + refused.host + refused.reason + refused.hint)
    assert harmless(str(CloudError("quota", "", text, text)))
    shown = io.StringIO()
    print_sanitized(text, shown)
    assert harmless(shown.getvalue())


def test_ordinary_text_stays() -> None:
    text = "größer\tals 漢字 👍\nno\u00a0break"
    assert sanitized(text) == text
    assert sanitized("\x1b[1;31mred\x1b[0m\r\nnext") == "red\nnext"


@pytest.mark.needs("sshd")
def test_a_login_shell_prints_escapes(tmp_path: Path) -> None:
    noise = tmp_path / "noise"
    noise.write_bytes("".join(HOSTILE.values()).encode())
    with loopback(tmp_path / "hosts", options=[f"ForceCommand cat {noise}; exit 1"]) as hosts:
        home = home_that_knows(hosts, tmp_path / "client")
        (tmp_path / "notebook").mkdir()
        with opened(tmp_path / "notebook", env={"HOME": str(home)}) as notebook:
            told = notebook.fail(
                f"%sky_pool lab --provider ssh --hosts h1 --python {sys.executable}", "shell-ended"
            )
            assert "\\x1b]0;owned\\x07" in told.evalue
            assert harmless(told.evalue)
            done = command(home, "status", "--hosts", "h1")
        assert done.returncode == 1
        assert "owned" in done.stdout + done.stderr
        assert harmless(done.stdout + done.stderr)


def test_facts_of_a_host() -> None:
    lines = "@sky system Linux\n@sky hostname n1\x1b]0;owned\x07\u202e\n@sky refusal no\rroom\n@sky end\n"
    facts = parse(lines)
    assert (facts.hostname, facts.refusal) == ("n1\\x1b]0;owned\\x07\\u202e", "no")


def test_logs_hold_escapes_of_ranks(tmp_path: Path) -> None:
    state = tmp_path / "state"
    with opened(
        tmp_path, "%sky_pool lab --ranks 1 --detach", env={"XDG_STATE_HOME": str(state)}
    ) as notebook:
        notebook.run(f"%%sky_broadcast\nprint({''.join(HOSTILE.values())!r} + 'end')")
        done = command(tmp_path, "logs", "lab", state=state)
        shown = notebook.run("%sky_logs").stdout
        notebook.run("%sky_down lab")
    assert done.returncode == 0, done.stderr
    assert "end" in done.stdout
    assert harmless(done.stdout)
    assert harmless(shown)


def command(home: Path, *line: str, state: Path | None = None) -> subprocess.CompletedProcess[str]:
    """The console command."""
    env = {**os.environ, "HOME": str(home), "XDG_STATE_HOME": str(state or home / "state")}
    code = "import sys; from skymagic.api.command import main; sys.exit(main())"
    return subprocess.run(
        [sys.executable, "-c", code, *line], env=env, capture_output=True, text=True, timeout=60
    )
