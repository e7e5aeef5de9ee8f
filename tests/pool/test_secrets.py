"""Secrets of a pool stand in no output, no argument of a process and no saved notebook."""

from __future__ import annotations

import json
from pathlib import Path

import psutil

from tests.lab.notebook import opened

WORDS = ("hunter2-value", "swordfish-value", "index-password")
CELLS = (
    "%sky_pool --dry-run --nodes 2 --env HF_TOKEN=hunter2-value --secret SWORD",
    "%sky_pool --nodes 1 --env HF_TOKEN=hunter2-value --secret SWORD",
    "pool = _\nimport skymagic as sky\nprint(repr(pool), pool, pool.plan, pool.plan.text())",
    "pool",
    "sky.Image(env={'HF_TOKEN': 'hunter2-value'}, pip_indexes=['https://me:index-password@pypi.example/simple'])",
    "%sky_status",
    "%%sky_broadcast\nimport os\nassert (os.environ['HF_TOKEN'], os.environ['SWORD'])[0][::-1].endswith('nuh')\n1/0",
    "%%sky_sh\ntest ${#SWORD} = 15 && exit 3",
    "%sky_logs",
    "with sky.Compute(provider=sky.Local(), image=sky.Image(pip=['nowhere-to-be-found @ "
    "https://me:index-password@pypi.example/x.whl', 'nor-this'], "
    "pip_indexes=['https://me:index-password@pypi.example/simple'])) as other: pass",
)


def test_secrets_are_never_shown(tmp_path: Path) -> None:
    with opened(tmp_path, "import skymagic", env={"SWORD": "swordfish-value"}) as notebook:
        shown = [notebook.finish(notebook.start(cell)) for cell in CELLS]
        texts = [
            json.dumps(each.outputs)
            + each.text
            + (each.error.text + each.error.evalue if each.error else "")
            for each in shown
        ]
        folders = notebook.value(
            "[pool.pool.resources.agents.started[0].directory, pool.pool.resources.agents.started[0].store]"
        )
        assert [Path(folder).stat().st_mode & 0o777 for folder in folders] == [0o700, 0o700], (
            "the user's alone"
        )
        files = [path for folder in folders for path in Path(folder).rglob("*") if path.is_file()]
        assert files
        assert not [
            path for path in files if any(word.encode() in path.read_bytes() for word in WORDS)
        ]
        arguments = [
            " ".join(process.cmdline())
            for process in psutil.Process(notebook.pid).children(recursive=True)
        ]
        failed = [each.error.ename if each.error else "" for each in shown]
    assert failed == [
        "",
        "",
        "",
        "",
        "",
        "",
        "ZeroDivisionError",
        "ScriptError",
        "",
        "RequestError",
    ]
    assert "extra-index-url https://****@pypi.example" in texts[-1]
    assert len(arguments) > 2
    for text in [*texts, *arguments]:
        assert not [word for word in WORDS if word in text], text
