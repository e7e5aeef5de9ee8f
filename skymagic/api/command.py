"""The console command ``skymagic``, for shells and programs without a notebook.

Exit codes:
    0: success.
    1: failure, complete or partial; standard error gives the reason.
    2: invalid command line.
    3, 4, 5: the notebook failed, was stopped or was lost (`EXIT_CODES`), for ``run``, ``attach``
        and ``logs``.
    130: Ctrl-C.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from skymagic.errors import RequestError, SkyError
from skymagic.wire.untrusted import print_sanitized

if TYPE_CHECKING:
    from skymagic.api.logs import LogsRequest

EXIT_CODES = {"done": 0, "failed": 3, "stopped": 4, "lost": 5}
"""Exit code by the notebook's final status, for ``run``, and for ``attach`` and ``logs`` of a
notebook.
"""
_USE_GET = "the executed notebook is saved on the head: skymagic get POOL NAME.executed.ipynb FILE"
REMOVED = {
    "clean": "use skymagic down --clean --hosts HOSTS",
    "cost": "use skymagic status --cost",
    "run -o": _USE_GET,
    "run --output": _USE_GET,
    "run --workdir": "copy what the notebook imports to the pool first, with %sky_put in a cell",
}
"""Maps removed commands and options to their replacements."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    argv = list(sys.argv[1:] if arguments is None else arguments)
    if removed := _removed_word(argv):
        print_sanitized(f"skymagic {removed} was removed: {REMOVED[removed]}", file=sys.stderr)
        return 2
    line = _parser().parse_args(argv)
    _start_debug_log()
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


def _start_debug_log() -> None:
    from skymagic.wire import debug_log

    if debug_log.level_of_environment():
        from skymagic.pool import debugging

        debugging.start("command")


def _removed_word(argv: Sequence[str]) -> str:
    """Return the first removed command or option of a command line, or ""."""
    options = [f"{argv[0]} {word.partition('=')[0]}" for word in argv[1:]]
    return next((candidate for candidate in [*argv[:1], *options] if candidate in REMOVED), "")


def _parser() -> argparse.ArgumentParser:
    import skymagic

    parser = argparse.ArgumentParser(
        "skymagic", description="Work with your pools from a shell, without a notebook."
    )
    parser.add_argument("--version", action="version", version=f"skymagic {skymagic.__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    pools = commands.add_parser(
        "pools", help="list pools of notebooks on this machine that keep running without them"
    )
    status = commands.add_parser(
        "status", help="show your pools on hosts, on EC2, or detached on this machine"
    )
    down = commands.add_parser(
        "down", help="end a pool and release its machines, or remove unused files from hosts"
    )
    for command in (status, down):
        command.add_argument("name", nargs="?", metavar="NAME", help="a pool's name or job id")
        command.add_argument(
            "--hosts",
            default=[],
            action="append",
            metavar="HOSTS",
            help="for example gpu1,user@gpu2 or gpu[1-4]; default: this machine",
        )
        command.add_argument(
            "--provider",
            choices=["aws", "slurm", "kubernetes", "ray"],
            help="look there, from any machine: for rented pools by their tags, or for jobs of a "
            "cluster",
        )
        command.add_argument(
            "--login",
            metavar="HOST",
            help="with --provider slurm: ask through this login node, over SSH",
        )
    status.add_argument(
        "--cost",
        action="store_true",
        help="show what rented pools cost now, and their costs of the last month",
    )
    status.add_argument(
        "--disk", action="store_true", help="show what skymagic stores on their disks"
    )
    down.add_argument(
        "--all",
        action="store_true",
        help="all your pools there; without --hosts: all machines you rented; with --clean: "
        "all files that no pool uses now",
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
    logs.add_argument(
        "--debug",
        action="store_true",
        help="show the debug logs of skymagic's own processes on all nodes instead",
    )
    stacks = commands.add_parser(
        "stacks", help="show where each rank of a pool is, also while a notebook's cell hangs"
    )
    stacks.add_argument("pool", metavar="POOL", help="its name or job id")
    stacks.add_argument(
        "-t", "--targets", "--rank", dest="rank", metavar="RANKS", help="ranks: 0,2 or 0:4"
    )
    attach = commands.add_parser(
        "attach",
        help="follow the output of a pool's ranks or of its notebook; Ctrl-C stops neither",
    )
    attach.add_argument("pool", metavar="POOL", help="its name or job id")
    run = commands.add_parser(
        "run",
        help="execute a notebook with papermill on a pool's head; Ctrl-C does not stop it",
    )
    run.add_argument("notebook", metavar="NOTEBOOK", help="an .ipynb file")
    run.add_argument("--pool", metavar="POOL", required=True, help="its name or job id")
    run.add_argument(
        "-p",
        "--parameters",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="set a notebook parameter, as in papermill",
    )
    run.add_argument(
        "--take-over", action="store_true", help="take the pool over from the notebook that uses it"
    )
    run.add_argument(
        "--detach", action="store_true", help="start it and return; `logs --follow` shows it later"
    )
    run.add_argument("--detached", dest="detach", action="store_true", help=argparse.SUPPRESS)
    get = commands.add_parser("get", help="copy a file or a folder from the head of a pool")
    get.add_argument("pool", metavar="POOL", help="its name or job id")
    get.add_argument(
        "source", metavar="SRC", help="path on the head, relative to the ranks' folder"
    )
    get.add_argument(
        "target", metavar="DST", nargs="?", default=".", help="path on this machine; default: ."
    )
    put = commands.add_parser("put", help="copy a file or a folder to all nodes of a pool")
    put.add_argument("pool", metavar="POOL", help="its name or job id")
    put.add_argument("source", metavar="SRC", help="path on this machine")
    put.add_argument(
        "target", metavar="DST", help="path on the nodes, relative to the ranks' folder"
    )
    cancel = commands.add_parser(
        "cancel",
        aliases=["stop"],
        help="stop a notebook started by `run`; the pool keeps running",
    )
    cancel.add_argument("pool", metavar="POOL", help="its name or job id")
    mcp = commands.add_parser(
        "mcp", help="serve a coding agent by the Model Context Protocol, over standard input"
    )
    mcp.set_defaults(call=_mcp)
    run.set_defaults(call=_run)
    cancel.set_defaults(call=_cancel)
    get.set_defaults(call=_get)
    put.set_defaults(call=_put)
    stacks.set_defaults(call=_stacks)
    logs.set_defaults(call=_logs)
    attach.set_defaults(call=_attach)
    for command in (pools, status, down, logs, stacks, attach, run, get, put, cancel):
        command.add_argument("--json", action="store_true", help="print JSON")
    pools.set_defaults(call=_pools)
    status.set_defaults(call=_status)
    down.set_defaults(call=_down)
    return parser


def _pools(line: argparse.Namespace) -> int:
    from skymagic.pool import records

    listed = records.readable_records()
    if line.json:
        pools = [record.plain() | {"left": records.is_left(record)} for record in listed]
        print_sanitized(json.dumps({"pools": pools}))
    else:
        lines = "\n".join(map(records.record_text, listed))
        print_sanitized(
            lines or "no notebook on this machine has a pool that keeps running without it"
        )
    return 0


def _status(line: argparse.Namespace) -> int:
    from skymagic.api import costs, disk, pool_listing
    from skymagic.plan.requests import CloudSettings

    request = pool_listing.StatusRequest(
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
        disks = disk.read_disks(line.hosts)
        print_sanitized(json.dumps(disk.plain(disks)) if line.json else disk.text(disks))
        return 1 if disks[1] else 0
    listing = pool_listing.listing(request, CloudSettings())
    print_sanitized(json.dumps(listing.plain()) if line.json else listing.text())
    return 1 if listing.result.unreached else 0


def _down(line: argparse.Namespace) -> int:
    from skymagic.api import disk, stopping
    from skymagic.plan.requests import CloudSettings

    request = stopping.DownRequest(
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
    done = stopping.stop_in_location(request, CloudSettings(), (), _progress)
    if done is None and line.name:
        done = stopping.stop_named(line.name, _progress)
    elif done is None and line.all:
        done = stopping.terminate_all_rented(_progress)
    elif done is None:
        raise RequestError(
            "name a pool on this machine, say where to look (--hosts gpu1,gpu2), or end all that "
            "you rented from EC2 (--all)"
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
    from skymagic.api.logs import LogsRequest
    from skymagic.plan.units import Selection

    if line.json and line.follow:
        raise RequestError("--json prints the current state once: leave -f out")
    rank = None if line.rank is None else Selection(line.rank)
    request = LogsRequest(
        rank, line.lines, line.follow, line.pool, line.run, line.cell, line.grep, debug=line.debug
    )
    if request.debug:
        from skymagic.api import debug_logs

        entries = debug_logs.from_outside(request)
        text = json.dumps(debug_logs.plain(entries)) if line.json else "\n".join(entries)
        print_sanitized(text)
        return 0
    return _show_logs(request, line.json)


def _attach(line: argparse.Namespace) -> int:
    """Follow the log of a pool; with ``--json`` print its current last lines."""
    from skymagic.api.logs import LogsRequest

    return _show_logs(LogsRequest(follow=not line.json, pool=line.pool), line.json)


def _show_logs(request: LogsRequest, as_json: bool) -> int:
    from skymagic.api import logs

    if as_json:
        print_sanitized(json.dumps(asdict(logs.report(request))))
        return 0
    status = logs.show_from_outside(request, lambda text: print(text, end="", flush=True))
    return EXIT_CODES.get(status, 0)


def _run(line: argparse.Namespace) -> int:
    from skymagic.api import logs, notebooks

    parameters = tuple(line.parameters)
    request = notebooks.NotebookRequest(Path(line.notebook), line.pool, parameters, line.take_over)
    record = notebooks.start(request)
    name = line.pool
    if line.json:
        print_sanitized(json.dumps({"pool": record.name, "output": request.executed}))
    else:
        print_sanitized(
            f"executing {record.notebook} on pool {name!r}: follow it with "
            f"`skymagic logs {name} -f`, and fetch the result with "
            f"`skymagic get {name} {request.executed}`",
            file=sys.stderr,
        )
    if line.detach:
        return 0
    request_log = logs.LogsRequest(pool=name, lines=sys.maxsize, follow=True)
    status = logs.show_job(record, request_log, lambda text: print(text, end="", flush=True))
    return EXIT_CODES.get(status, 0)


def _cancel(line: argparse.Namespace) -> int:
    from skymagic.api import notebooks

    state = notebooks.stop(line.pool)
    if state.status != "running":
        raise RequestError(
            f"no notebook is being executed on pool {line.pool!r}",
            code="notebook-run",
            names=[line.pool],
        )
    message = f"the notebook on pool {line.pool!r} is stopped"
    print_sanitized(json.dumps({"done": [message]}) if line.json else message)
    return 0


def _get(line: argparse.Namespace) -> int:
    from skymagic.api import notebooks

    message = notebooks.get(line.pool, line.source, line.target)
    print_sanitized(json.dumps({"done": [message]}) if line.json else message)
    return 0


def _put(line: argparse.Namespace) -> int:
    from skymagic.api import notebooks

    message = notebooks.put(line.pool, line.source, line.target)
    print_sanitized(json.dumps({"done": [message]}) if line.json else message)
    return 0


def _stacks(line: argparse.Namespace) -> int:
    from skymagic.api import positions
    from skymagic.plan.units import Selection

    rank = None if line.rank is None else Selection(line.rank)
    stacks = positions.positions(line.pool, rank)
    print_sanitized(json.dumps(stacks.plain()) if line.json else stacks.text())
    return 0


def _mcp(line: argparse.Namespace) -> int:
    from skymagic.api import mcp_server

    mcp_server.serve()
    return 0
