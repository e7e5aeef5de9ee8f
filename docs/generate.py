"""The pages of the reference that are read from the package: magics, settings, the command line and Python. ``python docs/generate.py`` writes them."""

from __future__ import annotations

import argparse
import inspect
import re
import sys
import textwrap
import types
from pathlib import Path

FOLDER = Path(__file__).resolve().parent / "reference"
sys.path.insert(0, str(FOLDER.parents[1]))

import skymagic  # noqa: E402  (the path is set above)
from skymagic.api.command import _parser  # noqa: E402  (the path is set above)
from skymagic.errors import CODES  # noqa: E402  (the path is set above)
from skymagic.magics.arguments.options import MAGICS, POOL, RUN, Option  # noqa: E402
from skymagic.magics.config import SkyMagic  # noqa: E402

CODES_BEGIN, CODES_END = "<!-- codes: docs/generate.py -->", "<!-- end of codes -->"
NOTE = "<!-- Written by docs/generate.py from the package; do not edit. -->\n"


def magics() -> str:
    """Every magic with its options; those of a pool and of a run stand in tables of their own, for several magics share them."""
    lines = [
        f"# Magics\n\n{NOTE}",
        "`%sky_…` magics take one line, `%%sky_…` magics a cell. Each shows this text with `--help` or `?`. Options may stand in any order;",
        "`{expr}` and `$var` are expanded on the line. `;` at the end of the line hides its value. A `# comment` may follow.",
        "Every magic that uses a pool takes `--pool NAME`, by default the pool used last; where the table has `[NAME]`, the name may stand alone.\n",
        "| magic | what it does | options |\n|---|---|---|",
    ]
    for name, face in MAGICS.items():
        own = [
            f"`{option.names[-1]}`"
            for option in face.options
            if option not in POOL and "--pool" not in option.names
        ]
        pool = (
            ["[options of a pool](#options-of-a-pool)"] if set(POOL) <= set(face.accepted) else []
        )
        lines.append(
            f"| [`{cell(called(name))}`](#{name.replace('_', '-')}) | {cell(face.summary)} | {' '.join(own + pool)} |"
        )
    lines += ["\n## Options of a pool\n", *table(POOL), "\n## Options of a run\n", *table(RUN)]
    for name, face in MAGICS.items():
        lines += [f"\n({name.replace('_', '-')})=\n## {called(name)}\n", face.summary]
        if face.examples:
            lines += ["\n```text", *face.examples, "```"]
        rest = [option for option in face.options if option not in POOL and option not in RUN]
        shared = [
            f"the [options of a {what}](#options-of-a-{what})"
            for what, options in (("run", RUN), ("pool", POOL))
            if set(options) <= set(face.accepted)
        ]
        if not shared:
            rest = list(face.options)
        if shared:
            lines.append(f"\nTakes {' and '.join(shared)}{', and:' if rest else '.'}")
        if rest:
            lines += ["", *table(rest)]
    return "\n".join(lines) + "\n"


def called(name: str) -> str:
    """A magic as it is written."""
    face = MAGICS[name]
    return f"{'%%' if face.cell else '%'}{name} {face.positional}".rstrip()


def table(options: tuple[Option, ...] | list[Option]) -> list[str]:
    """A table of options."""
    rows = ["| option | meaning |", "|---|---|"]
    for option in options:
        names = ", ".join(f"`{name}`" for name in option.names)
        rows.append(
            f"| {names} {f'`{cell(option.metavar)}`' if option.metavar else ''} | {cell(option.help)} |"
        )
    return rows


def settings() -> str:
    """The traits of ``%config SkyMagic``."""
    lines = [
        f"# Settings\n\n{NOTE}",
        '`%config SkyMagic.only = "all"` sets a default for this notebook; `c.SkyMagic.only = "all"` in',
        "`~/.ipython/profile_default/ipython_config.py` sets it for all notebooks.\n",
        "| setting | default | meaning |\n|---|---|---|",
    ]
    for name, trait in sorted(SkyMagic.class_own_traits().items()):
        lines.append(f"| `SkyMagic.{name}` | `{trait.default()!r}` | {cell(trait.help)} |")
    return "\n".join(lines) + "\n"


def command() -> str:
    """The command ``skymagic``, from its parsers."""
    parser = _parser()
    (commands,) = [
        action for action in parser._actions if isinstance(action, argparse._SubParsersAction)
    ]
    lines = [
        f"# Command line\n\n{NOTE}",
        "`skymagic` works on your pools from a shell, without a notebook. `--json` prints one JSON object.",
        "[Long runs](../how-to/long-runs.md#two-notebooks-and-a-terminal) has the format and the exit codes.",
    ]
    summaries = {choice.dest: choice.help for choice in commands._choices_actions}
    for name, one in commands.choices.items():
        if name not in summaries:  # another spelling of a command
            continue
        lines += [
            f"\n## skymagic {name}\n",
            f"{summaries[name]}\n",
            "| argument | meaning |",
            "|---|---|",
        ]
        for action in one._actions:
            if not isinstance(action, argparse._HelpAction) and action.help != argparse.SUPPRESS:
                metavar = (
                    " ".join(action.metavar)
                    if isinstance(action.metavar, tuple)
                    else action.metavar or ""
                )
                names = ", ".join(f"`{option}`" for option in action.option_strings)
                lines.append(
                    f"| {names} {f'`{metavar}`' if metavar else ''} | {cell(action.help or '')} |"
                )
    return "\n".join(lines) + "\n"


def python() -> str:
    """The names of ``import skymagic as sky``, with their signatures and docstrings; those of a pool's methods too."""
    lines = [
        f"# Python\n\n{NOTE}",
        "`import skymagic as sky` has the same as the magics. A pool that a magic started is `sky.find()`, and a magic finds one that Python started.",
        "[`sky.plugins`](plugins.md) and [`sky.errors`](errors.md) have their own pages. `sky.ComputePool` and `sky.compute` are Skyward's",
        "names of `sky.Compute` and `sky.function`.",
    ]
    for name in sorted(dir(skymagic), key=str.casefold):
        value = getattr(skymagic, name)
        if name.startswith("_") or "ipython" in name or isinstance(value, types.ModuleType):
            continue
        lines += described(f"sky.{name}", value, "##")
        if name == "Compute":
            methods = [
                each
                for each in dir(value)
                if callable(getattr(value, each)) and each[0] != "_" and each != "of"
            ]
            for each in methods:
                lines += described(f"pool.{each}", getattr(value, each), "###")
    return "\n".join(lines) + "\n"


def described(name: str, value: object, level: str) -> list[str]:
    """A name with its signature and its docstring."""
    signature = inspect.signature(value)  # type: ignore[arg-type]
    parameters = [
        one.replace(annotation=one.empty)
        for one in signature.parameters.values()
        if one.name != "self"
    ]
    call = str(signature.replace(parameters=parameters, return_annotation=signature.empty))
    return [
        f"\n{level} {name}\n",
        "```text",
        folded(f"{name}{call}"),
        "```\n",
        *prose(inspect.getdoc(value) or ""),
    ]


def prose(text: str) -> list[str]:
    """A docstring as Markdown: its paragraphs, and the entries of its sections (``Args:`` and the like) as lists."""
    lines = []
    for paragraph in text.strip().split("\n\n"):
        title, _, rest = paragraph.partition("\n")
        if title == "Returns:":
            lines.append(f"**Returns:** {' '.join(rest.split())}\n")
        elif title.endswith(":") and rest.startswith("    "):
            entries = re.split(r"\n(?=\S)", textwrap.dedent(rest))
            lines += [f"**{title}**\n", *map(entry, entries), ""]
        else:
            lines.append(" ".join(paragraph.split()) + "\n")
    return lines


def entry(text: str) -> str:
    """An entry of a section, ``name: meaning``, as one of a list; there may be several names."""
    names, _, meaning = " ".join(text.split()).partition(": ")
    return f"- {', '.join(f'`{name}`' for name in names.split(', '))}: {meaning}"


def folded(line: str) -> str:
    """A signature as lines that fit on a page."""
    return textwrap.fill(
        line, 88, subsequent_indent="    ", break_on_hyphens=False, break_long_words=False
    )


def cell(text: str) -> str:
    """A text within a table."""
    return text.replace("|", "\\|")


def errors() -> str:
    """The page of errors, whose text is written by hand, with its table of codes as the package has them."""
    text = (FOLDER / "errors.md").read_text()
    before, _, rest = text.partition(CODES_BEGIN)
    after = rest.partition(CODES_END)[2]
    rows = [f"| `{code}` | {cell(meaning)} |" for code, meaning in CODES.items()]
    table = "\n".join(["| code | meaning |", "|---|---|", *rows])
    return f"{before}{CODES_BEGIN}\n{table}\n{CODES_END}{after}"


PAGES = {
    "magics.md": magics,
    "settings.md": settings,
    "command.md": command,
    "python.md": python,
    "errors.md": errors,
}


def main() -> None:
    """Write the pages."""
    for name, written in PAGES.items():
        (FOLDER / name).write_text(written())


if __name__ == "__main__":
    main()
