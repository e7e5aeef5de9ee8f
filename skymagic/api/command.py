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

EXIT_CODES = {"done": 0, "nothing": 0, "failed": 3, "stopped": 4, "lost": 5}
"""Of ``attach`` and ``run``: how the run, or the notebook, has ended."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; its exit code."""
    line = _parser().parse_args(arguments)
    try:
        return int(line.call(line))
    except RequestError as refused:
        print(f"skymagic {line.command}: {refused}", file=sys.stderr)
        return 2
    except SkyError as problem:
        print(f"skymagic {line.command}: {problem}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    import skymagic

    parser = argparse.ArgumentParser("skymagic", description="Pools of this user, without a notebook.")
    parser.add_argument("--version", action="version", version=f"skymagic {skymagic.__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    pools = commands.add_parser(
        "pools", help="the pools that notebooks of this machine have started, and that outlive them"
    )
    status = commands.add_parser(
        "status", help="what of yours runs on hosts, or outlives its notebook on this machine, whoever started it"
    )
    down = commands.add_parser("down", help="end it")
    cost = commands.add_parser(
        "cost", help="what pools rented by notebooks of this machine cost, and have cost within a month"
    )
    for one in (status, down, cost):
        one.add_argument(
            "name", nargs="?", metavar="NAME", help="a pool's name" + ("" if one is cost else " or job id")
        )
    clean = commands.add_parser(
        "clean", help="remove what skymagic keeps on hosts' disks, and no pool has used for 30 days"
    )
    for one in (status, down, clean):
        one.add_argument(
            "--hosts",
            required=one is clean,
            default=[],
            action="append",
            metavar="HOSTS",
            help="as in gpu1,user@gpu2 or gpu[1-4]; this machine unless said",
        )
    for one in (status, down):
        one.add_argument(
            "--provider",
            choices=["aws"],
            help="what you have rented there, found by its tags, whichever machine has rented it",
        )
    clean.add_argument("--all", action="store_true", help="all of it that no pool uses now")
    clean.add_argument("--dry-run", action="store_true", help="say what would be removed")
    status.add_argument("--disk", action="store_true", help="what skymagic keeps on their disks instead")
    down.add_argument(
        "--all", action="store_true", help="every pool of yours there; without --hosts all that you have rented"
    )
    down.add_argument("--stop", action="store_true", help="of a rented pool: stop its machines, and keep their disks")
    down.add_argument("-y", "--yes", action="store_true", help="go ahead without a question")
    logs = commands.add_parser("logs", help="what ranks of a pool wrote, also when it has ended")
    logs.add_argument("pool", metavar="POOL", help="its name or job id")
    logs.add_argument("--rank", metavar="R", help="one rank, or several: 0,2 or 0:4")
    logs.add_argument("--run", type=int, metavar="ID", help="what one run wrote, by its number in the log")
    logs.add_argument("--cell", type=int, metavar="N", help="what the runs of one cell wrote")
    logs.add_argument("--grep", metavar="RE", help="lines that a regular expression is found in")
    logs.add_argument("-n", "--lines", type=_positive, default=50, help="how many of the last lines; 50 unless said")
    logs.add_argument(
        "-f", "--follow", action="store_true", help="go on as the log grows, until Ctrl-C or the end of the run"
    )
    attach = commands.add_parser(
        "attach",
        help="show what a running cell, or a notebook of `run`, has shown, and what it shows until it ends; Ctrl-C leaves it",
    )
    attach.add_argument("pool", metavar="POOL", help="its name or job id")
    run = commands.add_parser(
        "run",
        help="execute a whole notebook on a pool's head, without this machine; Ctrl-C leaves it, attach goes on with it",
    )
    run.add_argument("notebook", metavar="NOTEBOOK", help="an .ipynb file")
    run.add_argument("--pool", metavar="POOL", help="its name or job id; the only one unless said")
    run.add_argument(
        "-p", "--parameters", nargs=2, action="append", default=[], metavar=("NAME", "VALUE"), help="as papermill's"
    )
    run.add_argument(
        "-o", "--output", metavar="FILE", help="the executed notebook; NOTEBOOK.executed.ipynb unless said"
    )
    run.add_argument(
        "--workdir", metavar="DIR", help="the folder that its kernel runs in; on other machines a copy of it"
    )
    run.add_argument("--take-over", action="store_true", help="take the pool away from a notebook that has it")
    run.add_argument("--detach", action="store_true", help="begin it, and do not wait: attach shows it, and takes it")
    stop = commands.add_parser("stop", help="stop a notebook of `run`, as its stop button would; the pool goes on")
    stop.add_argument("pool", metavar="POOL", help="its name or job id")
    run.set_defaults(call=_run)
    stop.set_defaults(call=_stop)
    logs.set_defaults(call=_logs)
    attach.set_defaults(call=_attach)
    for one in (pools, status, cost, down, logs, attach, run):
        one.add_argument("--json", action="store_true", help="for programs")
    pools.set_defaults(call=_pools)
    cost.set_defaults(call=_cost)
    status.set_defaults(call=_status)
    down.set_defaults(call=_down)
    clean.set_defaults(call=_clean)
    return parser


def _pools(line: argparse.Namespace) -> int:
    from skymagic.pool import keys, records

    listed, runs = records.every(), keys.notebook_runs()
    if line.json:
        pools = [vars(one) | {"left": records.left(one)} for one in listed]
        print(json.dumps({"pools": pools, "notebooks": [one.plain for one in runs]}))
    else:
        words = [*map(keys.pool_words, listed), *(one.words for one in runs)]
        print("\n".join(words) or "no notebook of this machine has a pool that outlives it")
    return 0


def _cost(line: argparse.Namespace) -> int:
    from skymagic.api import costs

    found = costs.costs((), line.name)
    print(json.dumps(costs.plain(found)) if line.json else costs.text(found))
    return 0


def _status(line: argparse.Namespace) -> int:
    from skymagic.api import disk, places
    from skymagic.plan.requests import CloudSettings

    request = places.StatusRequest(line.name, tuple(line.hosts), line.disk, provider=line.provider)
    if mistakes := request.mistakes():
        raise RequestError(mistakes)
    if line.disk:
        disks = disk.look(line.hosts)
        print(json.dumps(disk.plain(disks)) if line.json else disk.text(disks))
        return 1 if disks[1] else 0
    found = places.look(request, CloudSettings())
    print(json.dumps(found.plain()) if line.json else found.text())
    return 1 if found.unreached else 0


def _down(line: argparse.Namespace) -> int:
    from skymagic.api import ending, places
    from skymagic.plan.requests import CloudSettings

    request = ending.DownRequest(line.name, line.all, tuple(line.hosts), line.stop, line.yes, line.provider)
    mistakes = request.mistakes()
    if line.stop and not line.name:
        mistakes.append("--stop: say which pool of rented machines, as in skymagic down NAME --stop")
    if mistakes:
        raise RequestError(mistakes)
    done = ending.by_place(request, CloudSettings(), (), _progress)
    if done is None and line.name:
        done = ending.end_left(line.name, _progress) or places.end_on_hosts((), line.name, every=False)
    elif done is None and line.all:
        done = ending.everything_rented(_progress)
    elif done is None:
        raise RequestError(
            "say which pool of this machine, or where: --hosts gpu1,gpu2; or --all for all that you have rented from EC2"
        )
    print(json.dumps({"done": done}) if line.json else "\n".join(done))
    return 0


def _progress(text: str) -> None:
    print(text, file=sys.stderr)


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
    request = logs.LogsRequest(rank, line.lines, line.follow, line.pool, line.run, line.cell, line.grep)
    if line.json:
        print(json.dumps(logs.plain(request)))
    else:
        logs.show_from_outside(request, lambda text: print(text, end="", flush=True))
    return 0


def _run(line: argparse.Namespace) -> int:
    from skymagic.api import executing, notebooks
    from skymagic.plan import parameters

    values = {name: parameters.value(text) for name, text in line.parameters}
    output = None if line.output is None else Path(line.output)
    request = notebooks.NotebookRequest(Path(line.notebook), line.pool, values, output, line.workdir, line.take_over)
    run = notebooks.begin(request)
    if line.detach:
        print(run.words)
        if run.ends:
            print(run.ends, file=sys.stderr)
        return 0
    return EXIT_CODES[executing.shown(run, line.json)]


def _stop(line: argparse.Namespace) -> int:
    from skymagic.api import notebooks

    notebooks.stop(line.pool)
    return 0


def _attach(line: argparse.Namespace) -> int:
    from skymagic.api import executing, reading
    from skymagic.pool import keys

    if (run := keys.notebook_run(line.pool)) is not None:
        return EXIT_CODES[executing.shown(run, line.json)]
    return EXIT_CODES[reading.attached(line.pool, line.json)]


def _clean(line: argparse.Namespace) -> int:
    from skymagic.api import disk

    lines, problems = disk.clean(line.hosts, line.all, line.dry_run)
    print("\n".join(lines))
    for host, reason in problems.items():
        print(f"skymagic clean: {host}: {reason}", file=sys.stderr)
    return 1 if problems else 0
