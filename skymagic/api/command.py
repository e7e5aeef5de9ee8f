"""The console command ``skymagic``: for shells and programs, without a notebook.

Exit codes: 0 it is done; 1 it is not, or not all of it, and standard error says why; 2 the line was wrong; of ``attach`` and ``run`` also 3, 4 and 5
(`EXIT_CODES`): how the run has ended; 130 Ctrl-C.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from skymagic.errors import RequestError, SkyError
from skymagic.wire.untrusted import print_sanitized

EXIT_CODES = {"done": 0, "nothing": 0, "failed": 3, "stopped": 4, "lost": 5}
"""Of ``attach`` and ``run``: how the run, or the notebook, has ended."""
REMOVED_COMMANDS = {
    "clean": "`skymagic clean` was removed: use `skymagic down --clean --hosts HOSTS`",
    "cost": "`skymagic cost` was removed: use `skymagic status --cost`",
}
"""Commands of earlier versions → what the user is told."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; its exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words and words[0] in REMOVED_COMMANDS:
        print_sanitized(REMOVED_COMMANDS[words[0]], file=sys.stderr)
        return 2
    line = _parser().parse_args(words)
    try:
        return int(line.call(line))
    except RequestError as refused:
        print_sanitized(f"skymagic {line.command}: {refused}", file=sys.stderr)
        return 2
    except SkyError as problem:
        print_sanitized(f"skymagic {line.command}: {problem}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    import skymagic

    parser = argparse.ArgumentParser(
        "skymagic", description="Work with your pools from a shell, without a notebook."
    )
    parser.add_argument("--version", action="version", version=f"skymagic {skymagic.__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    pools = commands.add_parser(
        "pools", help="list pools of this machine's notebooks that outlive them"
    )
    status = commands.add_parser(
        "status", help="show your pools on hosts, on EC2, or detached on this machine"
    )
    down = commands.add_parser(
        "down", help="end a pool and release its machines, or remove unused files from hosts"
    )
    for one in (status, down):
        one.add_argument("name", nargs="?", metavar="NAME", help="a pool's name or job id")
        one.add_argument(
            "--hosts",
            default=[],
            action="append",
            metavar="HOSTS",
            help="for example gpu1,user@gpu2 or gpu[1-4]; default: this machine",
        )
        one.add_argument(
            "--provider",
            choices=["aws", "slurm", "kubernetes", "ray"],
            help="pools you rented there, found by their tags, or jobs of a cluster, from any machine",
        )
        one.add_argument(
            "--login",
            metavar="HOST",
            help="with --provider slurm: ask through this login node, over SSH",
        )
    status.add_argument(
        "--cost",
        action="store_true",
        help="show what rented pools cost now and have cost within a month",
    )
    status.add_argument(
        "--disk", action="store_true", help="show what skymagic stores on their disks"
    )
    down.add_argument(
        "--all",
        action="store_true",
        help="all your pools there; without --hosts: all machines you rented; with --clean: all files that no pool uses now",
    )
    down.add_argument(
        "--clean",
        action="store_true",
        help="with --hosts: end no pool, and remove files that no pool has used for 30 days",
    )
    down.add_argument(
        "--dry-run", action="store_true", help="with --clean: show what would be removed"
    )
    logs = commands.add_parser(
        "logs", help="show the output of a pool's ranks, also after the pool is down"
    )
    logs.add_argument("pool", metavar="POOL", help="its name or job id")
    logs.add_argument(
        "-t", "--targets", "--rank", dest="rank", metavar="RANKS", help="ranks: 0,2 or 0:4"
    )
    logs.add_argument(
        "--run", type=int, metavar="ID", help="output of one run, by its number in the log"
    )
    logs.add_argument("--cell", type=int, metavar="N", help="output of one cell")
    logs.add_argument("--grep", metavar="RE", help="only lines that match a regular expression")
    logs.add_argument(
        "-n", "--lines", type=_positive, default=50, help="number of last lines; default: 50"
    )
    logs.add_argument(
        "-f",
        "--follow",
        action="store_true",
        help="follow the log until Ctrl-C or the end of the run",
    )
    attach = commands.add_parser(
        "attach",
        help="show the output of a running cell or notebook and follow it; Ctrl-C does not stop it",
    )
    attach.add_argument("pool", metavar="POOL", help="its name or job id")
    run = commands.add_parser(
        "run",
        help="execute a notebook on a pool's head, independent of this machine; Ctrl-C does not stop it",
    )
    run.add_argument("notebook", metavar="NOTEBOOK", help="an .ipynb file")
    run.add_argument("--pool", metavar="POOL", help="its name or job id; default: the only pool")
    run.add_argument(
        "-p",
        "--parameters",
        nargs=2,
        action="append",
        default=[],
        metavar=("NAME", "VALUE"),
        help="set a notebook parameter, as in papermill",
    )
    run.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        help="file for the executed notebook; default: NOTEBOOK.executed.ipynb",
    )
    run.add_argument(
        "--workdir", metavar="DIR", help="folder to run in; it is copied to remote machines"
    )
    run.add_argument(
        "--take-over", action="store_true", help="take the pool away from a notebook that has it"
    )
    run.add_argument(
        "--detach", action="store_true", help="start it and return; `attach` shows it later"
    )
    run.add_argument("--detached", dest="detach", action="store_true", help=argparse.SUPPRESS)
    cancel = commands.add_parser(
        "cancel",
        aliases=["stop"],
        help="cancel a notebook started by `run`; the pool keeps running",
    )
    cancel.add_argument("pool", metavar="POOL", help="its name or job id")
    run.set_defaults(call=_run)
    cancel.set_defaults(call=_cancel)
    logs.set_defaults(call=_logs)
    attach.set_defaults(call=_attach)
    for one in (pools, status, down, logs, attach, run, cancel):
        one.add_argument("--json", action="store_true", help="print JSON")
    pools.set_defaults(call=_pools)
    status.set_defaults(call=_status)
    down.set_defaults(call=_down)
    return parser


def _pools(line: argparse.Namespace) -> int:
    from skymagic.pool import keys, records

    listed, runs = records.every(), keys.notebook_runs()
    if line.json:
        pools = [vars(one) | {"left": records.left(one)} for one in listed]
        print_sanitized(json.dumps({"pools": pools, "notebooks": [one.plain for one in runs]}))
    else:
        words = [*map(keys.pool_words, listed), *(one.words for one in runs)]
        print_sanitized(
            "\n".join(words) or "no notebook on this machine has a pool that outlives it"
        )
    return 0


def _status(line: argparse.Namespace) -> int:
    from skymagic.api import costs, disk, places
    from skymagic.plan.requests import CloudSettings

    request = places.StatusRequest(
        line.name,
        tuple(line.hosts),
        line.disk,
        provider=line.provider,
        login=line.login,
        cost=line.cost,
    )
    if mistakes := request.mistakes():
        raise RequestError(mistakes)
    if line.cost:
        found_costs = costs.costs((), line.name)
        print_sanitized(
            json.dumps(costs.plain(found_costs)) if line.json else costs.text(found_costs)
        )
        return 0
    if line.disk:
        disks = disk.look(line.hosts)
        print_sanitized(json.dumps(disk.plain(disks)) if line.json else disk.text(disks))
        return 1 if disks[1] else 0
    found = places.look(request, CloudSettings())
    print_sanitized(json.dumps(found.plain()) if line.json else found.text())
    return 1 if found.unreached else 0


def _down(line: argparse.Namespace) -> int:
    from skymagic.api import disk, ending, places
    from skymagic.plan.requests import CloudSettings

    request = ending.DownRequest(
        line.name,
        line.all,
        tuple(line.hosts),
        line.provider,
        line.login,
        clean=line.clean,
        dry_run=line.dry_run,
    )
    mistakes = request.mistakes()
    if mistakes:
        raise RequestError(mistakes)
    if line.clean:
        lines, problems = disk.clean(line.hosts, line.all, line.dry_run)
        print_sanitized(
            json.dumps({"done": lines, "problems": problems}) if line.json else "\n".join(lines)
        )
        for host, reason in problems.items():
            print_sanitized(f"skymagic down: {host}: {reason}", file=sys.stderr)
        return 1 if problems else 0
    done = ending.by_place(request, CloudSettings(), (), _progress)
    if done is None and line.name:
        done = ending.end_left(line.name, _progress) or places.end_on_hosts(
            (), line.name, every=False
        )
    elif done is None and line.all:
        done = ending.everything_rented(_progress)
    elif done is None:
        raise RequestError(
            "say which pool of this machine, or where: --hosts gpu1,gpu2; or --all for all that you have rented from EC2"
        )
    print_sanitized(json.dumps({"done": done}) if line.json else "\n".join(done))
    return 0


def _progress(text: str) -> None:
    print_sanitized(text, file=sys.stderr)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def _logs(line: argparse.Namespace) -> int:
    from skymagic.api import logs
    from skymagic.plan.units import Selection

    if line.json and line.follow:
        raise RequestError("--json tells what there is now: leave -f out")
    rank = None if line.rank is None else Selection(line.rank)
    request = logs.LogsRequest(
        rank, line.lines, line.follow, line.pool, line.run, line.cell, line.grep
    )
    if line.json:
        print_sanitized(json.dumps(logs.plain(request)))
    else:
        logs.show_from_outside(request, lambda text: print(text, end="", flush=True))
    return 0


def _run(line: argparse.Namespace) -> int:
    from skymagic.api import executing, notebooks
    from skymagic.plan import parameters

    values = {name: parameters.value(text) for name, text in line.parameters}
    output = None if line.output is None else Path(line.output)
    request = notebooks.NotebookRequest(
        Path(line.notebook), line.pool, values, output, line.workdir, line.take_over
    )
    run = notebooks.begin(request)
    if line.detach:
        print_sanitized(json.dumps(run.plain) if line.json else run.words)
        if run.ends:
            print_sanitized(run.ends, file=sys.stderr)
        return 0
    return EXIT_CODES[executing.shown(run, line.json)]


def _cancel(line: argparse.Namespace) -> int:
    from skymagic.api import notebooks

    notebooks.stop(line.pool)
    said = f"the notebook on pool {line.pool!r} is cancelled; `skymagic attach {line.pool}` fetches what it has done"
    print_sanitized(json.dumps({"done": [said]}) if line.json else said)
    return 0


def _attach(line: argparse.Namespace) -> int:
    from skymagic.api import executing, reading
    from skymagic.pool import keys

    if (run := keys.notebook_run(line.pool)) is not None:
        return EXIT_CODES[executing.shown(run, line.json)]
    return EXIT_CODES[reading.attached(line.pool, line.json)]
