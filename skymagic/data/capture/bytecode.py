"""Names in code objects: the global names, modules and attributes that compiled code mentions."""

from __future__ import annotations

import dis
import types
from dataclasses import dataclass
from weakref import WeakKeyDictionary

_GLOBAL_STORES = {"STORE_NAME", "STORE_GLOBAL"}
_GLOBAL_LOADS = {"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS", "DELETE_GLOBAL"}
_OWN = {"__name__", "__module__", "__qualname__"}


@dataclass(frozen=True)
class CodeNames:
    """What a code object and the code inside it name."""

    loads: frozenset[str]
    """Global names."""
    imports: frozenset[str]
    """Dotted names of modules; ``from a import b`` counts as ``a`` and ``a.b``."""
    attributes: frozenset[str]
    """Names that may be attributes."""
    stores: frozenset[str] = frozenset()
    """Names that it binds itself, at its own level."""
    required: frozenset[str] = frozenset()
    """Those of the imports that are not in a ``try``."""


_known: WeakKeyDictionary[types.CodeType, CodeNames] = WeakKeyDictionary()


def code_names(code: types.CodeType) -> CodeNames:
    """The names in a code object and in the code inside it."""
    names = _known.get(code)
    if names is None:
        loads, stores, imports, module = set(), set(), set(), ""
        required: set[str] = set()
        tried = _tried(code)
        for step in dis.get_instructions(code):
            if step.opname in _GLOBAL_LOADS:
                loads.add(str(step.argval))
            elif step.opname in _GLOBAL_STORES:
                stores.add(str(step.argval))
            elif step.opname == "IMPORT_NAME":
                module = str(step.argval)
                imports.add(module)
                surely = not any(start <= step.offset < end for start, end in tried)
                required.update([module] if surely else ())
            elif step.opname == "IMPORT_FROM":
                imports.add(f"{module}.{step.argval}")
                required.update([f"{module}.{step.argval}"] if surely else ())
        inner = [code_names(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)]
        names = _known[code] = CodeNames(
            frozenset(loads).union(*(each.loads for each in inner)) - _OWN,
            frozenset(imports).union(*(each.imports for each in inner)),
            frozenset(code.co_names).union(*(each.attributes for each in inner)),
            frozenset(stores),
            frozenset(required).union(*(each.required for each in inner)),
        )
    return names


def _tried(code: types.CodeType) -> list[tuple[int, int]]:
    """Offsets (from, to) of what is in a ``try`` with an ``except``, and of the ``except`` itself; not in a ``with`` or before a ``finally``."""
    if not code.co_exceptiontable:
        return []
    steps = list(dis.get_instructions(code))
    index = {step.offset: number for number, step in enumerate(steps)}
    return [
        (entry.start, entry.end)
        for entry in getattr(dis.Bytecode(code), "exception_entries", ())
        if _handles([step.opname for step in steps[index[entry.target] : index[entry.target] + 8]])
    ]


def _handles(handler: list[str]) -> bool:
    """Whether this is the beginning of an ``except``, or what tidies up after one."""
    if handler[0] == "COPY":
        return True
    asked = handler.index("CHECK_EXC_MATCH") if "CHECK_EXC_MATCH" in handler else len(handler)
    named = {"PUSH_EXC_INFO", "LOAD_GLOBAL", "LOAD_NAME", "LOAD_ATTR", "BUILD_TUPLE", "LOAD_FAST", "NOP", "CACHE"}
    return handler[:2] == ["PUSH_EXC_INFO", "POP_TOP"] or (asked < len(handler) and named.issuperset(handler[:asked]))
