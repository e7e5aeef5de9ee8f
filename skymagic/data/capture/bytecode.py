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


_known: WeakKeyDictionary[types.CodeType, CodeNames] = WeakKeyDictionary()


def code_names(code: types.CodeType) -> CodeNames:
    """The names in a code object and in the code inside it."""
    names = _known.get(code)
    if names is None:
        loads, stores, imports, module = set(), set(), set(), ""
        for step in dis.get_instructions(code):
            if step.opname in _GLOBAL_LOADS:
                loads.add(str(step.argval))
            elif step.opname in _GLOBAL_STORES:
                stores.add(str(step.argval))
            elif step.opname == "IMPORT_NAME":
                module = str(step.argval)
                imports.add(module)
            elif step.opname == "IMPORT_FROM":
                imports.add(f"{module}.{step.argval}")
        inner = [code_names(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)]
        names = _known[code] = CodeNames(
            frozenset(loads).union(*(each.loads for each in inner)) - _OWN,
            frozenset(imports).union(*(each.imports for each in inner)),
            frozenset(code.co_names).union(*(each.attributes for each in inner)),
            frozenset(stores),
        )
    return names
