"""Refuse objects that read rank and world size in the notebook, which is process 0 of 1.

On the ranks every copy would silently remain process 0 of 1: all ranks would train on the same data
and write the same checkpoints. The frameworks are not imported here: if a value belongs to one, the
framework is loaded already.
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
"""Pairs of package and class; subclasses count too."""
_OF_DATA = (("torch.utils.data", "Sampler"), ("torch.utils.data", "Dataset"))
_RANKS = ("rank", "process_index")
_WORLDS = ("num_replicas", "world_size", "num_processes")


class WorldError(pickle.PicklingError):
    """Raised for an object that is bound to one rank and world size."""

    def __init__(self, value: object) -> None:
        super().__init__(f"{type_name(value)} {REASON}: {REMEDY}")
        self.type = type_name(value)


def check_for(kind: type) -> Callable[[Any], bool] | None:
    """Return a predicate that detects rank-bound objects of this type, or None if none are."""
    if any(is_a(kind, *type_path) for type_path in _TYPES):
        return lambda value: True
    if any(is_a(kind, *type_path) for type_path in _OF_DATA):
        return _has_share
    return None


def holds_rank(value: object) -> bool:
    """Return True if an object holds the rank and world size of the process that created it."""
    check = check_for(type(value))
    return check is not None and check(value)


def _has_share(value: Any) -> bool:
    """Return True for a sampler or dataset that already selected its rank's share of the data.

    Subclasses written by the user are recognized by their attribute names.
    """
    # Attributes may be private: `_rank` counts like `rank`.
    names = {name.lstrip("_") for name in getattr(value, "__dict__", {})}
    return not (names.isdisjoint(_RANKS) or names.isdisjoint(_WORLDS))
