"""Objects that know the world: they read rank and world size when they were made, in the notebook as process 0 of 1.

On the ranks each copy would still be process 0 of 1, without an error: all ranks train on the same data and write the
same checkpoints. So they are refused. The frameworks are not imported: a value of theirs has brought them in.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

from skymagic.data.values.kinds import is_a, type_name

REASON = "was made for the notebook alone, as process 0 of 1"
REMEDY = "create it in the broadcast cell"

_TYPES = (
    ("torch.utils.data", "DistributedSampler"),
    ("transformers", "TrainingArguments"),
    ("transformers", "Trainer"),
    ("transformers", "IterableDatasetShard"),
    ("transformers", "ShardSampler"),
    ("accelerate", "Accelerator"),
    ("accelerate", "PartialState"),
    ("accelerate", "AcceleratorState"),
    ("accelerate", "AcceleratedOptimizer"),
    ("accelerate", "AcceleratedScheduler"),
    ("accelerate", "DataLoaderStateMixin"),
    ("accelerate", "BatchSamplerShard"),
    ("accelerate", "IterableDatasetShard"),
    ("datasets", "DistributedConfig"),
    *((package, "Trainer") for package in ("lightning", "pytorch_lightning")),
    *((package, "Fabric") for package in ("lightning", "lightning_fabric")),
)
"""Package and class, subclasses included."""
_OF_DATA = (("torch.utils.data", "Sampler"), ("torch.utils.data", "Dataset"))
_RANKS = ("rank", "process_index")
_WORLDS = ("num_replicas", "world_size", "num_processes")


class WorldError(pickle.PicklingError):
    """Raised for an object that knows the world."""

    def __init__(self, value: object) -> None:
        super().__init__(f"{type_name(value)} {REASON}: {REMEDY}")
        self.type = type_name(value)


def check_for(kind: type) -> Callable[[Any], bool] | None:
    """Return what tells whether an object of this type knows the world, or None for types that never do."""
    if any(is_a(kind, *each) for each in _TYPES):
        return lambda value: True
    if any(is_a(kind, *each) for each in _OF_DATA):
        return _has_share
    return None


def knows_world(value: object) -> bool:
    """Return True if an object holds the rank and world size of the process that made it."""
    check = check_for(type(value))
    return check is not None and check(value)


def _has_share(value: Any) -> bool:
    """Return True for a sampler or dataset, also of the user's own, that has taken its share of the data as one rank of some."""
    names = {name.lstrip("_") for name in getattr(value, "__dict__", {})}
    return not (names.isdisjoint(_RANKS) or names.isdisjoint(_WORLDS))
