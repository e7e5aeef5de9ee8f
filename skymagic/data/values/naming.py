"""Values that are bound to names while others are still being rebuilt, for the code that rebuilds these may use them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from skymagic.data.values import rebuild


class Named:
    """A value that is bound to its name as soon as it is rebuilt: what is rebuilt after it may use it."""

    def __init__(self, name: str, value: object) -> None:
        self.name, self.value = name, value

    def __reduce__(self) -> Any:
        return rebuild.bound, (self.name, self.value)


class Accompanied:
    """A value with what its code uses to rebuild it, for a side that has nothing of these names."""

    def __init__(self, names: Mapping[str, object], value: object) -> None:
        self.names, self.value = names, value

    def __reduce__(self) -> Any:
        return rebuild.accompanied, tuple(_Lent(*each) for each in self.names.items()) + (self.value,)


class _Lent(Named):
    def __reduce__(self) -> Any:
        return rebuild.lent, (self.name, self.value)
