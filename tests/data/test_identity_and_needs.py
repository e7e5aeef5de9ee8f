"""What a value needs on the other side, and what of it stays one object there."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
import scipy.sparse
import torch

from skymagic.data.values import pickling

# what a value needs: a rank that lacks it gets it before the value is sent


class Meters(np.ndarray):
    """A subclass that travels by value."""


Meters.__module__ = "__main__"

NEEDS: dict[str, tuple[Any, str]] = {
    "array": (np.arange(3), "numpy"),
    "large array": (np.arange(300_000), "numpy"),
    "view": (np.arange(300_000)[::3], "numpy"),
    "subclass of the notebook": (np.arange(3).view(Meters), "numpy"),
    "masked array": (np.ma.masked_array([1, 2], [True, False]), "numpy"),
    "number of numpy": (np.float32(1.5), "numpy"),
    "time of numpy": (np.datetime64("2026-01-01"), "numpy"),
    "dtype": (np.dtype("f4"), "numpy"),
    "ufunc": (np.sin, "numpy"),
    "generator": (np.random.default_rng(0), "numpy"),
    "tensor": (torch.arange(3), "torch"),
    "half-precision tensor": (torch.zeros(3, dtype=torch.float8_e4m3fn), "torch"),
    "sparse tensor": (torch.eye(3).to_sparse(), "torch"),
    "parameter": (torch.nn.Parameter(torch.zeros(3)), "torch"),
    "storage": (torch.zeros(3).untyped_storage(), "torch"),
    "dtype of torch": (torch.float32, "torch"),
    "device": (torch.device("cpu"), "torch"),
    "shape": (torch.zeros(3, 4).shape, "torch"),
    "frame": (pd.DataFrame({"a": [1]}), "pandas"),
    "NA": (pd.NA, "pandas"),
    "timestamp": (pd.Timestamp("2026-01-01"), "pandas"),
    "sparse matrix": (scipy.sparse.csr_matrix([[1]]), "scipy"),
}


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", NEEDS)
def test_every_kind_of_value_tells_what_it_needs(kind: str, nested: bool) -> None:
    value, package = NEEDS[kind]
    pickled = pickling.dumps({"inner": [value]} if nested else value, {"__name__": "__main__"}, folder="/nowhere")
    assert package in {name.partition(".")[0] for name in pickled.required}
    assert package in pickled.packages
