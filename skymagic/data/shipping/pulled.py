"""Values that came from the ranks: they do not go back by themselves."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Pulled:
    """A value that came from the ranks, under the name that it has there."""

    values: tuple[object, ...]
    """The value, and the items of a list by rank."""
    type: str
    """On the ranks."""
    assigned: int = 0
    """The number of the last assignment before it came."""
    noted: bool = False
    """Whether the user knows that it does not go back."""

    @classmethod
    def of(cls, value: object, type: str, assigned: int) -> Pulled:
        """The notebook's value of a name, just after it came."""
        return cls((value, *(value if isinstance(value, list) else ())), type, assigned)

    def holds(self, value: object) -> bool:
        """Whether this is the value, or a part of it; if it is a part, the others are let go of."""
        if all(value is not each for each in self.values):
            return False
        if value is not self.values[0]:
            self.values = (value,)
        return True

    def stays(self, name: str, held: bool) -> str:
        """What to say of a name whose value here is not what the ranks have; `held`: whether one of them has one."""
        theirs = f"{name}: the ranks keep their own ({self.type})"
        return f"{theirs if held else f'{name} came from the ranks, and none of them has it now'}; --push {name} sends the notebook's"
