"""joblib and scikit-learn on a pool: tasks on the ranks while it is there, and joblib as it was afterwards."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest

import skymagic as sky
from skymagic.plugins import Cluster

pytestmark = pytest.mark.skipif(
    find_spec("joblib") is None, reason="joblib is not installed: pip install joblib"
)
needs_sklearn = pytest.mark.skipif(
    find_spec("sklearn") is None, reason="scikit-learn is not installed: pip install scikit-learn"
)
FACTOR = 3


@pytest.fixture(scope="module")
def pool() -> Iterator[Any]:
    """From the first test that uses it on, joblib's backend: those that look at joblib without a pool stand before it."""
    sklearn = [sky.plugins.sklearn()] if find_spec("sklearn") else []
    with sky.Compute(nodes=2, plugins=[sky.plugins.joblib(), *sklearn]) as made:
        yield made


def where(item: int) -> tuple[int, int]:
    """Uses a name of the module, as notebook functions do."""
    return item * FACTOR, sky.instance_info().world_size


def in_parallel(function: Any, items: Any, **options: Any) -> list[Any]:
    from joblib import Parallel, delayed

    found: list[Any] = Parallel(**{"n_jobs": -1, **options})(
        delayed(function)(item) for item in items
    )
    return found


def test_joblib_backend_is_restored_in_any_order_of_pool_ends() -> None:
    from joblib import parallel

    def state() -> tuple[Any, ...]:
        return (
            dict(parallel.BACKENDS),
            type(parallel.get_active_backend()[0]),
            parallel.get_active_backend()[1],
        )

    before = state()
    first, second = (sky.Compute(nodes=n, plugins=["joblib"]).start() for n in (1, 2))
    try:
        assert in_parallel(where, range(20)) == [(3 * n, 2) for n in range(20)]
        assert parallel.effective_n_jobs(-1) == 2
        assert second.runs > 0
        for options in ({"n_jobs": 1}, {"backend": "threading"}, {"require": "sharedmem"}):
            assert in_parallel(where, range(3), **options) == [(3 * n, 1) for n in range(3)], (
                "not on the ranks"
            )
        second.stop()
        assert in_parallel(where, range(2), n_jobs=2)[0][1] == 1
        assert os.getpid() not in in_parallel(lambda _: os.getpid(), range(2)), (
            "one rank is another place than the notebook"
        )
        second.start()
        first.stop()
        assert in_parallel(where, range(2))[0][1] == 2
    finally:
        first.stop()
        second.stop()
    assert state() == before


def test_errors_keep_their_type_and_stop_the_rest(pool: Any) -> None:
    def task(item: int) -> None:
        if item == 1:
            raise KeyError("planted")
        time.sleep(600 if item < 1 else 0)  # until it is stopped

    with pytest.raises(KeyError, match="planted"):
        in_parallel(task, range(8))
    assert in_parallel(where, range(8)) == [(3 * n, 2) for n in range(8)]


def test_nested_parallelism_is_threads_of_the_rank(pool: Any) -> None:
    def outer(item: int) -> Any:
        def inner(x: int) -> tuple[int, int, bool]:
            return x, os.getpid(), threading.current_thread() is threading.main_thread()

        return os.getpid(), in_parallel(inner, range(3))

    for pid, inner in in_parallel(outer, range(4)):
        assert inner == [(x, pid, False) for x in range(3)]


def test_short_tasks_share_calls(pool: Any) -> None:
    before = pool.runs
    assert in_parallel(abs, range(2000)) == list(range(2000))
    assert pool.runs - before < 1000


@needs_sklearn
def test_packages() -> None:
    assert sky.plugins.sklearn().transform(sky.Image(), Cluster()).pip == ("joblib", "scikit-learn")
    assert sky.plugins.sklearn(version="1.5.2").transform(sky.Image(), Cluster()).pip == (
        "joblib",
        "scikit-learn==1.5.2",
    )


@needs_sklearn
def test_a_grid_search_runs_on_the_ranks(pool: Any) -> None:
    from sklearn.datasets import make_classification
    from sklearn.model_selection import GridSearchCV
    from sklearn.svm import SVC

    x, y = make_classification(300, 10, random_state=0)
    grid = {"C": [0.1, 1, 10], "gamma": [0.01, 0.1]}
    alone = GridSearchCV(SVC(), grid, cv=3, n_jobs=1).fit(x, y)
    before = pool.runs
    found = GridSearchCV(SVC(), grid, cv=3, n_jobs=-1).fit(x, y)
    assert pool.runs > before
    assert found.best_params_ == alone.best_params_
    assert list(found.cv_results_["mean_test_score"]) == list(alone.cv_results_["mean_test_score"])
