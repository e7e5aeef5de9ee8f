"""Names in string literals: code (``eval``), templates (``'{x}'.format(**globals())``), IPython's calls, keys of the namespace.

What is computed while the cell runs (``globals()[prefix + name]``, a template in a variable) cannot be seen in its text.
"""

from __future__ import annotations

import ast
import re
import string
import warnings
from collections.abc import Iterable

from skymagic.data.capture.bytecode import code_names

_SHELL = {"system", "getoutput"}
_MAGIC = {"run_line_magic", "run_cell_magic"}
_CODE_MAGICS = {"time", "timeit", "prun", "memit", "mprun", "lprun", "capture", "pyinstrument"}
_FORMATTERS = {"format", "format_map", "substitute", "safe_substitute"}
_DICT_READERS = {"get", "pop", "setdefault"}
# IPython's own: a dollar inside single quotes belongs to the shell, and $$ is a dollar.
_DOLLAR = re.compile(r"(.*?)\$(\$?[\w.]+)(?=(?:[^']*'[^']*')*[^']*$)", re.DOTALL)
_OPTION = re.compile(r"^\s*(?:-[nrsltTDm]\s*\S+|-\w+)\s*")
_PERCENT = re.compile(r"(?<!%)(?:%%)*%\((\w+)\)")

GLOBALS = frozenset({"globals"})
"""What returns the global names, wherever it is called."""
MODULE_LEVEL = frozenset({"globals", "vars", "locals"})
"""What returns the global names when a cell itself calls it; in a function two of them return the function's own."""
MARKERS = frozenset({"globals", "eval", "exec", "query", "run_line_magic", "run_cell_magic", "system", "getoutput"})
"""Names in the code of a function of which some string literal may name more; what is not among them need not be parsed."""


def string_names(node: ast.AST, namespaces: frozenset[str] = GLOBALS) -> set[str]:
    """Global names that a call, an operator or a comparison reads by a literal string.

    Args:
        namespaces: functions that return the global names where the node stands.
    """
    if isinstance(node, ast.Call):
        return _call_names(node, namespaces)
    if isinstance(node, ast.BinOp):  # '%(x)s' % globals()
        formats = isinstance(node.op, ast.Mod) and is_namespace(node.right, namespaces)
        return set(_PERCENT.findall(_text(node.left) or "")) if formats else set()
    if isinstance(node, ast.Compare):  # 'x' in globals()
        names = (_text(each) for each in (node.left, *node.comparators[:-1]))
        inside = [
            name
            for name, operator, where in zip(names, node.ops, node.comparators, strict=True)
            if name is not None and isinstance(operator, ast.In | ast.NotIn) and is_namespace(where, namespaces)
        ]
        return _identifiers(inside)
    return set()


def namespace_item(node: ast.Subscript, namespaces: frozenset[str] = GLOBALS) -> str | None:
    """``"x"`` for ``globals()["x"]``."""
    return _text(node.slice) if is_namespace(node.value, namespaces) else None


def is_namespace(node: ast.expr, namespaces: frozenset[str] = GLOBALS) -> bool:
    """Whether an expression is the table of global names: ``globals()``, or IPython's own."""
    if isinstance(node, ast.Attribute) and node.attr == "user_ns":
        return _is_call_of(node.value, frozenset({"get_ipython"}))
    return _is_call_of(node, namespaces)


def template_names(text: str) -> set[str]:
    """Names that IPython would put into a shell or magic line: in ``{expr}`` and ``$var``."""
    names: set[str] = set()
    for expression in _fields(text):
        names |= _code_names(expression.strip(), "eval")
    for match in _DOLLAR.finditer(text):
        if not match[2].startswith("$"):
            names.add(match[2].partition(".")[0])
    return _identifiers(names)


def run_file(call: ast.Call) -> tuple[str, bool] | None:
    """File of a ``%run`` line, and whether it runs among the notebook's variables (``-i``); None for any other call."""
    texts = _texts(call)
    if not isinstance(call.func, ast.Attribute) or call.func.attr != "run_line_magic" or texts[:1] != ["run"]:
        return None
    options, words = "", texts[1].split() if len(texts) > 1 else []
    while words and words[0].startswith("-"):
        option = words.pop(0)
        options += option[1:]
        if option in ("-N", "-l") and words:
            words.pop(0)
    if not words or "m" in options or any(sign in words[0] for sign in "{$"):
        return None
    name = words[0].strip("'\"")
    return (name if name.endswith((".py", ".ipy", ".ipynb")) else name + ".py"), "i" in options


def _call_names(call: ast.Call, namespaces: frozenset[str]) -> set[str]:
    texts = _texts(call)
    if isinstance(call.func, ast.Name):
        return _code_names(texts[0], call.func.id) if texts and call.func.id in ("eval", "exec") else set()
    if not isinstance(call.func, ast.Attribute):
        return set()
    method, owner = call.func.attr, call.func.value
    if method in _FORMATTERS and any(is_namespace(each, namespaces) for each in _tables(call)):
        return _placeholders(owner, method)
    if not texts:
        return set()
    if method in _DICT_READERS and is_namespace(owner, namespaces):
        return _identifiers(texts[:1])
    if method in ("query", "eval"):
        return set(re.findall(r"@(\w+)", texts[0]))
    return _ipython_names(method, texts) if _is_call_of(owner, frozenset({"get_ipython"})) else set()


def _tables(call: ast.Call) -> Iterable[ast.expr]:
    """What a template is filled from: ``globals()`` in ``substitute(globals())`` and ``format(**globals())``."""
    yield from call.args
    yield from (keyword.value for keyword in call.keywords if keyword.arg is None)


def _placeholders(template: ast.expr, method: str) -> set[str]:
    """Names in a literal template, ``'{x}'`` or ``Template('$x')``."""
    if method.startswith("format"):
        return _identifiers(re.split(r"[.\[]", field)[0] for field in _fields(_text(template) or ""))
    called = template.func if isinstance(template, ast.Call) else None
    kind = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
    texts = _texts(template) if isinstance(template, ast.Call) and kind == "Template" else []
    found = (match["named"] or match["braced"] for text in texts for match in string.Template.pattern.finditer(text))
    return {name for name in found if name}


def _fields(text: str) -> list[str]:
    """Replacement fields of a format string; none if it is not well formed."""
    try:
        return [name for _, name, _, _ in string.Formatter().parse(text) if name]
    except ValueError:
        return []


def _ipython_names(method: str, texts: list[str]) -> set[str]:
    if method in _SHELL:
        return template_names(texts[0])
    if method not in _MAGIC or len(texts) < 2:
        return set()
    names = template_names(texts[1])
    if texts[0] in _CODE_MAGICS:
        line = texts[1]
        while (option := _OPTION.match(line)) is not None:
            line = line[option.end() :]
        for code in (line, *texts[2:]):
            names |= _code_names(code, "exec")
    return names


def _code_names(source: str, mode: str) -> set[str]:
    """Names that a piece of code loads and does not bind itself; empty when it is not Python."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the ranks will say it
            code = compile(source, "<string>", mode, ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return set()
    names = code_names(code)
    return set(names.loads - names.stores)


def _texts(call: ast.Call) -> list[str]:
    return [arg.value for arg in call.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]


def _text(node: ast.expr) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def _identifiers(names: Iterable[str]) -> set[str]:
    return {name for name in names if name.isidentifier()}


def _is_call_of(node: ast.expr, names: frozenset[str]) -> bool:
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in names
        and not (node.args or node.keywords)
    )
