"""What is not known gets the nearest name: words, keywords that a function does not take, and names of Skyward, with a sentence for each."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from difflib import get_close_matches
from typing import Any, TypeVar


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """``"; did you mean 'A100'?"`` for the known word nearest to `word`, or ``""`` when none is near.

    Case, dashes and look-alikes (o and 0, l and 1) do not count.
    """
    folded = {_fold(name): name for name in known}
    close = get_close_matches(_fold(word), folded, n=1, cutoff=0.6)
    return f"; did you mean {folded[close[0]]!r}?" if close else ""


def _fold(word: str) -> str:
    return word.casefold().translate(str.maketrans("oil", "011", "-_"))


class LazyNames(Collection[str]):
    """A collection of names, loaded on use: a few are at hand, and finding all of them takes time."""

    def __init__(
        self, at_hand: Collection[str], all_of_them: Callable[[], Collection[str]]
    ) -> None:
        self._at_hand = at_hand
        self._all = all_of_them

    def __contains__(self, name: object) -> bool:
        return name in self._at_hand or name in self._all()

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())


T = TypeVar("T", bound=Callable[..., Any])


def suggesting(
    name: str, others: Mapping[str, str] | None = None, second_names: Collection[str] = ()
) -> Callable[[T], T]:
    """A decorator of functions and classes.

    Args:
        name: what messages call it.
        others: a keyword as other tools have it → what it is here.
        second_names: keywords that are accepted, and not in the signature, so that they do not complete.
    """

    def decorate(target: T) -> T:
        function: Any = target.__init__ if isinstance(target, type) else target  # type: ignore[misc]
        signature = inspect.signature(function)
        known = [
            one.name
            for one in signature.parameters.values()
            if one.name != "self" and one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)
        ]

        @functools.wraps(function)
        def checked(*args: Any, **keywords: Any) -> Any:
            check_keywords(name, keywords, known, others or {})
            return function(*args, **keywords)

        if second_names:
            shown = [one for one in signature.parameters.values() if one.name not in second_names]
            checked.__signature__ = signature.replace(parameters=shown)  # type: ignore[attr-defined]
        if isinstance(target, type):
            target.__init__ = checked  # type: ignore[misc]
            return target
        return checked  # type: ignore[return-value]

    return decorate


def check_keywords(
    name: str, given: Iterable[str], known: Collection[str], others: Mapping[str, str]
) -> None:
    """Raise TypeError for keywords that are not known; all at once."""
    wrong = [word for word in given if word not in known]
    if wrong:
        raise TypeError(
            "; ".join(f"{name} takes no {word!r}{_instead(word, known, others)}" for word in wrong)
        )


def _instead(word: str, known: Collection[str], others: Mapping[str, str]) -> str:
    if word in others:
        return f": write {others[word]}"
    return did_you_mean(word, known) or f"; it takes {', '.join(known) or 'none'}"


_CLOUDS = "Container GCP Hyperstack JarvisLabs LambdaCloud MassedCompute Novita RunPod Scaleway TensorDock VastAI Verda Vultr"
RENT_ELSEWHERE = "To use machines from another cloud, start them with SkyPilot (https://docs.skypilot.co) or by hand, and connect over SSH"
_FILES = "Storage Volume storage"
_COLLECTIONS = "barrier counter dict lock queue set"
_SERVICES = "App Client Session DockerImage containers metrics offers LogConfig OfferRepository"


def _sentences() -> dict[str, str]:
    groups = {
        _CLOUDS: "there is no provider {name}; there are sky.Local, sky.SSH, sky.Slurm and sky.AWS. " + RENT_ELSEWHERE,
        _FILES: "there is no {name}: %sky_put brings files to the nodes and %sky_get takes them back; what lies in a bucket is "
        "read in the function, with its own client (s3fs, boto3)",
        _COLLECTIONS: "there is no {name} that nodes share: calls return their values, and on the ranks the framework's own "
        "collectives serve (torch.distributed, jax)",
        "Spec Worker Options": "there is no {name}: sky.Compute takes its keywords, procs_per_node, timeout and console themselves",
        _SERVICES: "there is no {name}: sky.Compute makes pools, sky.find finds them, and %sky_status shows them",
    }  # fmt: skip
    return {
        name: text.format(name=f"sky.{name}")
        for names, text in groups.items()
        for name in names.split()
    }


ABSENT_NAMES = _sentences()
"""Public names, as ``sky.NAME``."""

ABSENT_PROVIDERS = frozenset(name.lower() for name in [*_CLOUDS.split(), "Azure"])
"""Providers that other tools have, as ``provider="NAME"``."""

ABSENT_PLUGINS = {
    "cuml": "there is no plugin cuml: RAPIDS' own switch needs none, `%load_ext cuml.accel` in a broadcast cell or "
    "`cuml.accel.install()` in a function, before scikit-learn is imported",
    "mig": "there is no plugin mig: partition the GPUs on the machine (nvidia-smi mig), and give each rank its part with "
    "CUDA_VISIBLE_DEVICES=MIG-… in a cell, before CUDA is used",
    "mps": "there is no plugin mps: start nvidia-cuda-mps-control on the machine, and ranks on one GPU share it",
}
"""Plugins, as ``sky.plugins.NAME``."""
