"""What a notebook shows of machines that can be rented, and what it asks before anything costs money."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from skymagic.providers.aws.clients import is_configured
from tests.lab import ec2 as lab
from tests.lab.ec2 import EC2, ec2
from tests.lab.ec2_prices import EC2Market
from tests.lab.notebook import Notebook, opened


@pytest.fixture(scope="module")
def cloud() -> Iterator[EC2]:
    with ec2() as made:
        EC2Market(made, {"p4d.24xlarge": 21.957642}, {("p4d.24xlarge", "us-east-1b"): 9.1})
        yield made


@pytest.fixture(scope="module")
def notebook(cloud: EC2, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Notebook]:
    folder = tmp_path_factory.mktemp("renting")
    env = {
        **{name.upper(): value for name, value in lab.CREDENTIALS.items()},
        "AWS_ENDPOINT_URL": cloud.url,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_CONFIG_FILE": "/dev/null",
        "AWS_EC2_METADATA_DISABLED": "true",
        "XDG_CACHE_HOME": str(folder / ".cache"),
    }
    with opened(folder, env=env) as made:
        yield made


def test_gpus_that_can_be_rented_as_a_table(notebook: Notebook) -> None:
    shown = notebook.run("%sky_gpus A100:8 --nodes 4")
    (table,) = shown.rich
    first, best, *_ = table["text/plain"].splitlines()
    assert first.split()[:2] == ["per", "hour"]
    assert best.startswith("$87.83    p4d.24xlarge  ")
    assert re.search("us-east-1 a b c d  .* 20", best)
    assert "<td>$87.83</td><td>p4d.24xlarge</td>" in table["text/html"]
    assert "machine: " in shown.stdout.splitlines()[0], "what is here comes first"


def test_gpu_is_also_sought_on_aws_if_set_up(notebook: Notebook) -> None:
    (table,) = notebook.run("%sky_gpus a100 -o offers").rich
    assert "p4d.24xlarge" in table["text/plain"]
    assert notebook.run("offers").rich == [table]
    assert notebook.value("offers['p4d.24xlarge'][0].price") == 21.957642
    notebook.run("import warnings; warnings.simplefilter('ignore')")
    line = "offers['p4d"
    offered = f"[one.text for one in get_ipython().Completer.completions({line!r}, {len(line)})]"
    assert "p4d.24xlarge" in notebook.value(offered)
    assert notebook.run("%sky_gpus").rich == [], "all of them would be a long list"


def test_gpus_request_uses_the_notebooks_settings(notebook: Notebook) -> None:
    notebook.run("%config SkyMagic.aws = {'profile': 'nobodys'}")
    assert "nobodys" in notebook.fail("%sky_gpus A100:8 --spot", "cloud-credentials").text
    notebook.run("%config SkyMagic.aws = {}")


def test_missing_gpu_is_sought_on_aws_if_set_up(notebook: Notebook) -> None:
    asked = notebook.fail("%sky_pool train --gpu A100:8 --nodes 2").text
    assert "2 × p4d.24xlarge (8 × A100)" in asked
    assert "add -y" in asked
    assert "A100" in (here := notebook.fail("%sky_pool train --provider local --gpu A100:8").text)
    assert "p4d" not in here
    assert "add -y" in notebook.fail("%%sky_broadcast --nodes 2 --gpu A100:8 --spot\n1").text


def test_declared_pool_is_confirmed_at_its_first_cell(notebook: Notebook, cloud: EC2) -> None:
    said = notebook.run("%sky_pool later --gpu A100:8 --nodes 2 --provider aws --lazy").said
    assert re.search("pool 'later' .* 2 nodes × 8 ranks on 2 × p4d.24xlarge", said)
    assert "$43.92 per hour" in said
    asked = notebook.fail("%%sky_broadcast\n1").text
    assert "2 × p4d.24xlarge (8 × A100)" in asked
    assert "add -y" in asked
    assert "sky_down" not in notebook.run("%sky_down later").text
    assert "RunInstances" not in [call.action for call in cloud.calls]


def test_misuse_and_refusals_are_explained(notebook: Notebook, cloud: EC2) -> None:
    unknown = notebook.fail("%sky_gpus RTX4090 --spot")
    assert unknown.ename == "UsageError"
    assert re.search("us-east-1 .*RTX4090 .*spot; available:", unknown.text)
    assert "trn1 " in notebook.fail("%sky_gpus trn1").text
    cloud.on(
        "DescribeInstanceTypes",
        lab.error("ExpiredToken", "The token is expired"),
        when=lambda call: call.region == "eu-west-1",
        times=99,
    )
    cloud._rules.insert(0, cloud._rules.pop())
    failed = notebook.fail("%sky_gpus A100:8 --region eu-west-1", "cloud-credentials")
    assert failed.ename == "CloudError"
    assert "aws sso" in notebook.fields()["hint"]


def test_a_question_is_asked_in_a_notebook_and_no_is_no(notebook: Notebook) -> None:
    many = 33 * notebook.value("len(__import__('os').sched_getaffinity(0))")
    questions, shown = notebook.answering(f"%sky_pool --ranks {many}", "n")
    (asked,) = questions
    assert asked.startswith(f"{many} ranks on ")
    assert asked.endswith("Go ahead? [y/N] ")
    assert "add -y" in shown.text
    assert "ready" not in notebook.run("%sky_status").said


def test_stop_at_a_question_is_a_no_without_traceback(notebook: Notebook) -> None:
    many = 33 * notebook.value("len(__import__('os').sched_getaffinity(0))")
    cell = notebook.start(f"%sky_pool --ranks {many}", answering=True)
    asked = notebook._client.get_stdin_msg(timeout=60)["content"]["prompt"]
    assert asked.endswith("Go ahead? [y/N] ")
    notebook.interrupt()
    notebook.finish(cell)
    assert "add -y" in cell.text
    assert "Traceback" not in cell.text + cell.failure.text
    assert "live.py" not in cell.text + cell.failure.text
    assert "ready" not in notebook.run("%sky_status").said


@pytest.mark.parametrize(
    ("answer", "value"),
    [("y", True), ("YES ", True), ("", False), ("n", False), ("yep", False), ("да", False)],
)
def test_only_yes_is_yes(notebook: Notebook, answer: str, value: bool) -> None:
    questions, _ = notebook.answering(
        "from skymagic.display.live import ask_yes_no\nsaid = ask_yes_no('4 machines: $87.83 per hour')",
        answer,
    )
    assert questions == ["4 machines: $87.83 per hour. Go ahead? [y/N] "]
    assert notebook.value("said") is value


def test_background_cells_ask_no_questions(notebook: Notebook) -> None:
    notebook.run("from skymagic.display.live import ask_yes_no\nsaid = ask_yes_no('?')")
    assert notebook.value("said") is False, "papermill, nbconvert"
    questions, _ = notebook.answering(
        "import threading\none = threading.Thread(target=lambda: globals().update(said=ask_yes_no('?')))\none.start(); one.join()",
        "y",
    )
    assert questions == []
    assert notebook.value("said") is False
    notebook.run("import os\nos.environ['SKYMAGIC_NONINTERACTIVE'] = '1'")
    questions, _ = notebook.answering("said = ask_yes_no('?')", "y")
    notebook.run("del os.environ['SKYMAGIC_NONINTERACTIVE']")
    assert questions == []
    assert notebook.value("said") is False


ASK = "from skymagic.display.live import ask_yes_no; print('said', ask_yes_no('?'))"


@pytest.mark.parametrize("stdin", [subprocess.DEVNULL, subprocess.PIPE])
def test_a_program_without_a_terminal_is_not_asked(stdin: int) -> None:
    ended = subprocess.Popen(
        [sys.executable, "-c", ASK], stdin=stdin, stdout=subprocess.PIPE, text=True
    )
    assert ended.stdout is not None
    assert ended.stdout.read() == "said False\n", (
        "a pipe that never says anything is not waited for"
    )
    ended.stdout.close()
    if ended.stdin is not None:
        ended.stdin.close()
    assert ended.wait() == 0


def test_a_terminal_is_asked() -> None:
    ours, theirs = pty.openpty()
    os.write(ours, b"y\n")
    ended = subprocess.run(
        [sys.executable, "-c", ASK], stdin=theirs, capture_output=True, text=True, timeout=60
    )
    os.close(ours)
    os.close(theirs)
    assert ended.stdout == "?. Go ahead? [y/N] said True\n"


def test_where_aws_is_set_up_is_seen_without_a_call(tmp_path: Path) -> None:
    assert not is_configured({}, tmp_path)
    assert is_configured({"AWS_PROFILE": "work"}, tmp_path)
    assert not is_configured({"AWS_CONFIG_FILE": "/dev/null", "AWS_ACCESS_KEY_ID": ""}, tmp_path)
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws" / "config").write_text("[default]\nregion = us-east-1\n")
    assert is_configured({}, tmp_path)
    assert not is_configured({"AWS_CONFIG_FILE": "/dev/null"}, tmp_path)
