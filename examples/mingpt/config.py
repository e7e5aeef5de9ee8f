"""The configuration: a TOML file, and words of the command line that change single values of it."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Data:
    """The text, and how it is cut."""

    path: str
    block_size: int
    train_split: float
    truncate: float


@dataclass(frozen=True)
class Model:
    """The size of the transformer."""

    layers: int
    heads: int
    width: int
    dropout: float


@dataclass(frozen=True)
class Optimizer:
    """AdamW's settings."""

    learning_rate: float
    weight_decay: float


@dataclass(frozen=True)
class Trainer:
    """How long, on what, and what is kept."""

    epochs: int
    batch_size: int
    log_every: int
    save_every: int
    snapshot: str
    clip: float
    seed: int
    device: str


@dataclass(frozen=True)
class Config:
    """All of it; `folder` is where the file lies."""

    folder: Path
    data: Data
    model: Model
    optimizer: Optimizer
    trainer: Trainer


SECTIONS: dict[str, type[Any]] = {
    "data": Data,
    "model": Model,
    "optimizer": Optimizer,
    "trainer": Trainer,
}


def read(path: Path, words: Sequence[str] = ()) -> Config:
    """The configuration of a file, changed by words like ``trainer.epochs=2``.

    Raises:
        SystemExit: a word names nothing, or its value is of another kind.
    """
    table = tomllib.loads(path.read_text())
    config = Config(path.parent, **{name: kind(**table[name]) for name, kind in SECTIONS.items()})
    for word in words:
        config = changed(config, word)
    return config


def changed(config: Config, word: str) -> Config:
    """The configuration with one value changed."""
    key, equals, text = word.partition("=")
    section, _, name = key.partition(".")
    kind = SECTIONS.get(section)
    if kind is None or not equals or name not in {field.name for field in fields(kind)}:
        known = [
            f"{section}.{field.name}"
            for section, kind in SECTIONS.items()
            for field in fields(kind)
        ]
        raise SystemExit(f"{word!r} changes nothing; write one of {', '.join(known)}, with =VALUE")
    part = getattr(config, section)
    wanted = type(getattr(part, name))
    try:
        value = wanted(text)
    except ValueError:
        raise SystemExit(f"{word!r}: {key} takes a value like {getattr(part, name)!r}") from None
    return replace(config, **{section: replace(part, **{name: value})})
