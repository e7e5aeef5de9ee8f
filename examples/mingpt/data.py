"""Characters of a text as a dataset: each item is a block, and the same block one character later."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.data import Dataset


class Text:
    """A text as numbers.

    Args:
        text: the text; its characters, sorted, are the vocabulary.
    """

    def __init__(self, text: str) -> None:
        self.characters = sorted(set(text))
        self._number = {character: number for number, character in enumerate(self.characters)}
        self.numbers = self.encode(text)

    def encode(self, text: str) -> Tensor:
        """The text as a tensor of int64."""
        return torch.tensor([self._number[character] for character in text], dtype=torch.long)

    def decode(self, numbers: Tensor) -> str:
        """What `encode` was given."""
        return "".join(self.characters[number] for number in numbers.tolist())


class Blocks(Dataset[tuple[Tensor, Tensor]]):
    """Blocks of a text, none overlapping another.

    Args:
        numbers: int64, one for each character.
        size: characters of a block.
    """

    def __init__(self, numbers: Tensor, size: int) -> None:
        self._numbers, self._size = numbers, size

    def __len__(self) -> int:
        return max(0, (len(self._numbers) - 1) // self._size)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        first = index * self._size
        block = self._numbers[first : first + self._size + 1]
        return block[:-1], block[1:]
