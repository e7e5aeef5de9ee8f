"""Process-wide settings that a cell changes: `logging.basicConfig`, `plt.rcParams`, and so on.

Each rank is a separate process, so settings changed in the notebook are missing there. Only known
setters are recognized, in code that a cell certainly runs, and not within a block that restores the
setting: `with plt.rc_context(): plt.rc(…)`.
"""

from __future__ import annotations

import ast
import inspect
import sys
import types
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

from skymagic.data.capture.executed import called_bodies, children
from skymagic.data.capture.registrations import dotted_path

_SETTERS: Mapping[str, frozenset[str]] = {
    package: frozenset(names.split())
    for package, names in {
        "logging": "basicConfig captureWarnings addLevelName dictConfig disable fileConfig "
        "setLogRecordFactory setLoggerClass",
        "warnings": "filterwarnings resetwarnings simplefilter",
        "matplotlib": "rc rcdefaults rc_file rc_file_defaults set_loglevel switch_backend use",
        "matplotlib_inline": "set_matplotlib_formats set_matplotlib_close",
        "seaborn": "set set_theme set_style set_context set_palette reset_defaults reset_orig",
        "numpy": "set_printoptions seterr seterrcall setbufsize",
        "pandas": "set_option reset_option set_eng_float_format",
        "polars": "set_tbl_rows set_tbl_cols set_fmt_str_lengths set_fmt_float set_verbose",
        "torch": "set_default_dtype set_default_device set_default_tensor_type set_num_threads "
        "set_num_interop_threads set_printoptions set_grad_enabled set_detect_anomaly "
        "set_float32_matmul_precision use_deterministic_algorithms "
        "set_deterministic_debug_mode set_flush_denormal set_warn_always set_sharing_strategy "
        "enable_flash_sdp enable_mem_efficient_sdp enable_math_sdp enable_cudnn_sdp set_logs",
        "tensorflow": "enable_op_determinism run_functions_eagerly set_soft_device_placement "
        "set_jit",
        "keras": "set_floatx set_backend set_epsilon set_image_data_format set_dtype_policy "
        "set_global_policy enable_traceback_filtering disable_traceback_filtering "
        "enable_interactive_logging disable_interactive_logging",
        "sklearn": "set_config",
        "xarray": "set_options",
        "cv2": "setNumThreads setUseOptimized",
        "transformers": "set_verbosity set_verbosity_debug set_verbosity_info "
        "set_verbosity_warning set_verbosity_error enable_progress_bar disable_progress_bar "
        "enable_explicit_format",
        "datasets": "set_verbosity set_verbosity_debug set_verbosity_info "
        "set_verbosity_warning set_verbosity_error enable_caching disable_caching "
        "enable_progress_bars disable_progress_bars",
        "decimal": "setcontext",
        "locale": "setlocale",
        "socket": "setdefaulttimeout",
        "sys": "setrecursionlimit set_int_max_str_digits",
    }.items()
}
"""By package: its functions that set something for the whole process.

Seeds are not included: each rank has a different one on purpose.
"""
_OBJECTS: Mapping[str, str] = {
    "matplotlib.RcParams": "matplotlib",
    "pandas._config.config.DictWrapper": "pandas",
    "jax._src.config.Config": "jax",
}
"""Types of objects that hold a package's options: `plt.rcParams`, `pd.options`, `jax.config`."""
_CHANGING_METHODS = frozenset(("update", "setdefault", "pop", "clear"))
"""Methods of the objects in `_OBJECTS` that change an option."""
_LOGGER_SETTERS = frozenset(("setLevel", "addHandler", "removeHandler", "addFilter"))
"""Methods that configure a logger."""
_ALSO_CHANGES: Mapping[str, str] = {"seaborn": "matplotlib", "matplotlib_inline": "matplotlib"}
"""Maps a package to another package, whose settings it also changes."""
_SINGLE_TOPIC = frozenset(("logging", "warnings", "matplotlib", "jax"))
"""Packages whose settings are one topic.

Each can be configured in many ways: once a cell has changed any setting of the package on the
ranks, none of them is reported any more.
"""


class Setting(NamedTuple):
    """A setting that a cell changes."""

    package: str
    text: str
    """The setter as written in the cell: `"plt.rcParams.update"`."""

    @property
    def topic(self) -> str:
        """The setting's subject, regardless of how the setter is written."""
        return self.package if self.package in _SINGLE_TOPIC else self.text.rpartition(".")[2]

    def matters_to(self, packages: Collection[str]) -> bool:
        """Return True if the setting matters to code that uses these packages."""
        if self.package == "warnings":  # any package may issue warnings
            return any(package not in sys.stdlib_module_names for package in packages)
        return self.package in packages or _ALSO_CHANGES.get(self.package) in packages


def is_settings_object(value: object) -> bool:
    """Return True if a value holds the options of a package."""
    kind = type(value)
    return f"{kind.__module__}.{kind.__qualname__}" in _OBJECTS


def settings(tree: ast.AST, namespace: Mapping[str, object]) -> set[Setting]:
    """Return the settings that a cell changes, also by calling functions of the notebook."""
    changed: set[Setting] = set()
    called: set[types.CodeType] = set()
    pending: list[tuple[ast.AST, Mapping[str, object]]] = [(tree, namespace)]
    while pending:
        tree, names = pending.pop()
        for node, restored in _certain_nodes(tree, names, frozenset()):
            changed.update(
                setting for setting in _changed_by(node, names) if setting.package not in restored
            )
            pending += called_bodies(node, names, namespace, called)
    return changed


def _certain_nodes(
    node: ast.AST, names: Mapping[str, object], restored: frozenset[str]
) -> Iterator[tuple[ast.AST, frozenset[str]]]:
    """Yield the nodes that are certainly executed.

    Each comes with the packages whose settings a surrounding `with` block restores at its end.
    """
    # A stack, because a sum of a thousand terms is a tree deeper than Python's recursion limit.
    pending = [(node, restored)]
    while pending:
        node, restored = pending.pop()
        yield node, restored
        if isinstance(node, ast.With | ast.AsyncWith):
            # The package's own context manager restores its settings at the end of the block.
            restored |= {
                package
                for item in node.items
                if (package := _package_of_context_manager(item, names))
            }
        pending.extend((child, restored) for child in reversed(_certain_children(node, names)))


def _certain_children(node: ast.AST, names: Mapping[str, object]) -> list[ast.AST]:
    """Return the child nodes that are executed whenever this one is."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        return []
    if isinstance(node, ast.If):
        taken = _constant_truth(node.test, names)
        return [node.test] if taken is None else [*(node.body if taken else node.orelse)]
    # Of expressions with branches, only the first operand is certain.
    if isinstance(node, ast.IfExp):
        return [node.test]
    if isinstance(node, ast.BoolOp):
        return [node.values[0]]
    if isinstance(node, ast.Match):
        return [node.subject]
    # Handlers run only after an error.
    if isinstance(node, ast.Try):
        return [*node.body, *node.orelse, *node.finalbody]
    return children(node)


def _constant_truth(test: ast.expr, names: Mapping[str, object]) -> bool | None:
    """Return the value of a condition that is a constant or the name of a bool, else None."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        opposite = _constant_truth(test.operand, names)
        return None if opposite is None else not opposite
    if isinstance(test, ast.Constant):
        return bool(test.value)
    value = names.get(test.id) if isinstance(test, ast.Name) else None
    return value if isinstance(value, bool) else None


def _package_of_context_manager(item: ast.withitem, names: Mapping[str, object]) -> str:
    """Return the package whose context manager is entered, or ""."""
    call = item.context_expr
    path = dotted_path(call.func if isinstance(call, ast.Call) else call)
    return _resolve(path, names)[0] if path else ""


def _changed_by(node: ast.AST, names: Mapping[str, object]) -> Iterator[Setting]:
    """Yield the settings that one node changes."""
    if isinstance(node, ast.Call):
        yield from _changed_by_call(node.func, names)
    elif isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign):
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            yield from _changed_by_target(target, names)


def _changed_by_call(func: ast.expr, names: Mapping[str, object]) -> Iterator[Setting]:
    path = dotted_path(func)
    if path:
        package, owner = _resolve(path[:-1], names) if len(path) > 1 else ("", None)
        # A setter called through its module: `np.set_printoptions(…)`.
        if isinstance(owner, types.ModuleType | type):
            if path[-1] in _SETTERS.get(package, ()):
                yield Setting(package, ".".join(path))
        elif is_settings_object(owner) and path[-1] in _CHANGING_METHODS:
            yield Setting(package, ".".join(path))
        elif _is_logger(owner) and path[-1] in _LOGGER_SETTERS:
            yield Setting("logging", ".".join(path))
        elif len(path) == 1:  # a function imported by name
            function = names.get(path[0])
            package = str(getattr(function, "__module__", "")).partition(".")[0]
            if getattr(function, "__name__", "") in _SETTERS.get(package, ()):
                yield Setting(package, path[0])
    elif isinstance(func, ast.Attribute) and isinstance(func.value, ast.Call):
        called_path = dotted_path(func.value.func)  # logging.getLogger().setLevel(…)
        if func.attr in _LOGGER_SETTERS and called_path[-1:] == ["getLogger"]:
            yield Setting("logging", f"{'.'.join(called_path)}().{func.attr}")


def _changed_by_target(target: ast.expr, names: Mapping[str, object]) -> Iterator[Setting]:
    """Yield the options that an assignment sets.

    For example `plt.rcParams["figure.dpi"] = …` or `pd.options.display.max_rows = …`.
    """
    item = target
    while isinstance(item, ast.Subscript):
        item = item.value
    path = dotted_path(item)
    if len(path) == 1 and item is target:
        return  # rebinds the name itself
    for length in range(1, len(path) + 1):
        package, owner = _resolve(path[:length], names)
        if is_settings_object(owner):
            yield Setting(package, ".".join(path))
            return


def _is_logger(value: object) -> bool:
    logging = sys.modules.get("logging")
    return logging is not None and isinstance(value, logging.Logger)


def _resolve(path: list[str], names: Mapping[str, object]) -> tuple[str, object]:
    """Return the package and the value of a dotted name, without running code of the package.

    Return ("", None) if the name does not resolve.
    """
    value: Any = names.get(path[0])
    package = _package_of(value)
    for name in path[1:]:
        if isinstance(value, types.ModuleType):
            value = vars(value).get(name)
        else:
            value = inspect.getattr_static(value, name, None)
        if isinstance(value, types.ModuleType):
            package = _package_of(value)
    if is_settings_object(value):
        package = _OBJECTS[f"{type(value).__module__}.{type(value).__qualname__}"]
    return package, value


def _package_of(value: object) -> str:
    if isinstance(value, types.ModuleType):
        return value.__name__.partition(".")[0]
    return str(getattr(value, "__module__", "") or "").partition(".")[0]
