"""The Keras plugin: the backend before the import, training together on JAX, and never apart without a word."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest

import skymagic as sky
from skymagic.errors import RequestError
from skymagic.plugins import Cluster, resolve
from tests.lab.golden import Golden

needs_keras = pytest.mark.skipif(
    find_spec("keras") is None, reason="keras is not installed: pip install keras"
)
needs_jax = pytest.mark.skipif(
    find_spec("jax") is None, reason="jax is not installed: pip install jax"
)
needs_torch = pytest.mark.skipif(
    find_spec("torch") is None, reason="torch is not installed: pip install torch"
)


# ------------------------------------------------------------------------------------------------------ plans


def test_packages_and_the_variable() -> None:
    made = sky.plugins.keras(backend="torch").transform(sky.Image(pip=["torch==2.3.0"]), Cluster())
    assert made.pip == ("torch==2.3.0", "keras>=3")
    assert made.env == {"KERAS_BACKEND": "torch"}
    gpu = Cluster(accelerator=sky.accelerators.A100())
    assert sky.plugins.keras(backend="jax").transform(sky.Image(), gpu).pip == (
        "keras>=3",
        "jax[cuda12]",
    )
    assert sky.plugins.keras(backend="tensorflow").transform(sky.Image(), gpu).pip == (
        "keras>=3",
        "tensorflow",
    )


def test_jax_is_set_up_first_whatever_the_order() -> None:
    found = resolve([sky.plugins.keras(backend="jax"), sky.plugins.jax()])
    assert [plugin.name for plugin in found] == ["jax", "keras"]


def test_unknown_or_conflicting_backend_is_refused() -> None:
    with pytest.raises(RequestError, match="no backend 'theano'; it has jax, torch, tensorflow"):
        sky.plugins.keras(backend="theano")
    with pytest.raises(RequestError, match="KERAS_BACKEND is 'jax'"):
        sky.plugins.keras(backend="torch").transform(
            sky.Image(env={"KERAS_BACKEND": "jax"}), Cluster()
        )


# --------------------------------------------------------------------------------------------------- training


@sky.function
def train(items: list[int], *, norm: bool = False) -> dict[str, Any]:
    """A small model on this rank's part of the data; `items` says how large that is, by rank."""
    import keras
    import numpy as np

    rank = sky.instance_info().rank
    layers: list[Any] = [keras.layers.Input((8,)), keras.layers.Dense(8, activation="relu")]
    if norm:
        layers += [keras.layers.BatchNormalization(), keras.layers.Dropout(0.1)]
    model = keras.Sequential([*layers, keras.layers.Dense(1)])
    model.compile("adam", "mse")
    x = np.random.RandomState(rank).randn(items[rank], 8).astype("float32")
    history = model.fit(x, x.sum(1, keepdims=True), epochs=3, batch_size=8, verbose=0)
    return {
        "backend": keras.backend.backend(),
        "weights": [np.asarray(weight, "float64").sum().item() for weight in model.get_weights()],
        "epochs": len(history.epoch),
    }


def equal(results: list[dict[str, Any]]) -> bool:
    return all(each["weights"] == results[0]["weights"] for each in results)


@pytest.fixture(scope="module")
def on_torch() -> Iterator[Any]:
    with sky.Compute(nodes=2, plugins=["torch", "keras:backend=torch"]) as made:
        yield made


@needs_keras
@needs_torch
def test_together_on_torch_is_refused(on_torch: Any) -> None:
    with pytest.raises(RuntimeError) as refused:
        train([24, 24]) @ on_torch
    told = str(refused.value)
    for words in (
        "Keras on torch averages no gradients over ranks",
        "--plugin jax --plugin keras:backend=jax",
        "DistributedDataParallel",
        "--plugin keras:backend=torch,sync=false",
    ):
        assert words in told
    assert (train([16] * 2) >> on_torch)["epochs"] == 3


@needs_keras
@needs_torch
def test_a_model_that_was_used_is_no_other_one(on_torch: Any) -> None:
    @sky.function
    def looks() -> list[bool]:
        import keras
        import numpy as np

        from skymagic.data.values import pickling
        from skymagic.data.values.contents import contents_hash
        from skymagic.data.values.forms import form_for

        def look() -> str:
            return contents_hash(model, pickling.reducer({}), form_for, lambda _: None)

        model = keras.Sequential(
            [keras.layers.Input((8,)), keras.layers.Dropout(0.1), keras.layers.Dense(1)]
        )
        model.compile("adam", "mse")
        first = look()
        model.predict(np.ones((8, 8)), verbose=0)
        used = look()
        model.fit(np.ones((8, 8)), np.ones((8, 1)), verbose=0)
        trained = look()
        model.optimizer.learning_rate = 0.5
        return [used == first, trained == first, look() == trained]

    assert looks() >> on_torch == [True, False, False]


@needs_keras
@needs_torch
def test_fit_on_torch_without_a_process_group_is_refused(golden: Golden) -> None:
    with sky.Compute(nodes=2, plugins=["keras:backend=torch"]) as pool:
        with golden.raises(RuntimeError):
            train([16, 16]) @ pool
        assert (train([16, 16]) >> pool)["epochs"] == 3


WITHOUT_RANKS = """
import os
import skymagic as sky
from skymagic.runtime import info as runtime
def fit(**options):
    with sky.plugins.keras(**options).around_app(runtime.InstanceInfo(world_size=2)):
        os.environ["KERAS_BACKEND"] = "torch"  # TensorFlow need not be installed
        import keras, numpy as np
        model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        try:
            print(len(model.fit(np.ones((8, 2)), np.ones((8, 1)), verbose=0).epoch))
        except RuntimeError as problem:
            print(problem)
runtime.participants = lambda: (0, 1)
for backend in "tensorflow", "torch":
    fit(backend=backend, sync=False)
for ranks in (0,), (0, 1):
    runtime.participants = lambda: ranks
    fit(backend="tensorflow")
"""
"""In one process: importing torch and Keras takes longer than the rest."""


@needs_keras
@needs_torch
def test_fit_on_tensorflow_is_refused_unless_apart_is_asked_for(golden: Golden) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_RANKS],
        capture_output=True,
        text=True,
        check=True,
        timeout=250,
    )
    *fitted, several = done.stdout.splitlines()
    assert fitted == ["1"] * 3, "apart, apart, and of one rank"
    golden(several)
    assert "separately" not in done.stderr


@pytest.fixture(scope="module")
def on_jax() -> Iterator[Any]:
    with sky.Compute(nodes=2, plugins=["keras:backend=jax", "jax"]) as made:
        yield made


@needs_keras
@needs_jax
@pytest.mark.parametrize("norm", [False, True], ids=["plain", "batch normalisation"])
def test_jax_trains_one_model(on_jax: Any, norm: bool) -> None:
    results = train([24, 24], norm=norm) @ on_jax
    assert results[0]["backend"] == "jax"
    assert equal(results)
    if not norm:
        reported = on_jax.metrics.loss.unstack()
        assert reported.index.tolist() == [3, 6, 9], (
            "without a bar of its own, each epoch's end is reported"
        )
        assert reported.notna().all(axis=None)


UNEQUAL = pytest.mark.parametrize(
    ("items", "words"), [([8, 24], "equally many batches"), ([23, 24], "equally many items")]
)


@needs_keras
@needs_jax
@UNEQUAL
def test_unequal_parts_are_refused_on_jax(on_jax: Any, items: list[int], words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        train(items) @ on_jax
    assert "drop_last=True" in str(caught.value)


@needs_keras
@needs_jax
def test_one_rank_trains_a_model_of_its_own_on_jax(on_jax: Any) -> None:
    assert (train([16, 16]) >> on_jax)["epochs"] == 3
    assert equal(train([16, 16]) @ on_jax)


@needs_keras
@needs_jax
def test_a_model_of_all_ranks_is_not_trained_by_one(golden: Golden, on_jax: Any) -> None:
    @sky.function
    def make() -> None:
        import keras

        globals()["shared"] = keras.Sequential([keras.layers.Input((8,)), keras.layers.Dense(1)])
        globals()["shared"].compile("sgd", "mse")

    @sky.function
    def use() -> None:
        import numpy as np

        globals()["shared"].fit(np.ones((8, 8)), np.ones((8, 1)), verbose=0)

    make() @ on_jax
    with golden.raises(RuntimeError):
        use() >> on_jax
    use() @ on_jax
