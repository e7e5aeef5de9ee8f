"""A magic's line becomes a request: tables of options, a reader for each kind of value, all mistakes at once.

Nothing on a line is evaluated. IPython has expanded ``{expr}`` and ``$var`` before; a trailing ``# comment``, quotes
and a trailing ``;`` are understood here. Each ``parse_…`` raises RequestError with every mistake of its line.

tokens         a lexer: a line becomes tokens
readers        the text of a value becomes what a request holds
options        the tables: every option, and each magic's own
reading        the parser: tokens become values by option, mistakes are collected
toml           the body of %%sky_pool does the same
pool_magic     %sky_pool and %%sky_pool
cell_magics    %%sky_broadcast, %%sky_run, %%sky_sh
line_magics    the other magics, one small request each
help           the text of a magic's docstring; completion
"""

from skymagic.magics.arguments.cell_magics import parse_broadcast, parse_run, parse_sh
from skymagic.magics.arguments.help import CompletionNames, complete, help_text
from skymagic.magics.arguments.line_magics import (
    DownRequest,
    FilesRequest,
    LogsRequest,
    NamesRequest,
    RestartRequest,
    parse_attach,
    parse_auto,
    parse_cost,
    parse_down,
    parse_get,
    parse_gpus,
    parse_logs,
    parse_pull,
    parse_push,
    parse_put,
    parse_restart,
    parse_status,
)
from skymagic.magics.arguments.options import MAGICS, PLUGINS, POOL, RUN, Magic, Option
from skymagic.magics.arguments.pool_magic import parse_pool, parse_pool_toml
from skymagic.magics.arguments.tokens import Token, split

__all__ = [
    "MAGICS",
    "PLUGINS",
    "POOL",
    "RUN",
    "DownRequest",
    "FilesRequest",
    "LogsRequest",
    "Magic",
    "CompletionNames",
    "NamesRequest",
    "Option",
    "RestartRequest",
    "Token",
    "complete",
    "help_text",
    "parse_attach",
    "parse_auto",
    "parse_broadcast",
    "parse_cost",
    "parse_down",
    "parse_get",
    "parse_gpus",
    "parse_logs",
    "parse_pool",
    "parse_pool_toml",
    "parse_pull",
    "parse_push",
    "parse_put",
    "parse_restart",
    "parse_run",
    "parse_sh",
    "parse_status",
    "split",
]
