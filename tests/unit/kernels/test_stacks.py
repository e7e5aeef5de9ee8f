"""Frames of the machinery are left out of a rank's stack, and no others are."""

from __future__ import annotations

import asyncio.base_events
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from types import FrameType

import pytest

from skymagic.kernels import stacks


@pytest.mark.parametrize("name", [*stacks.INTERNAL])
def test_frames_of_the_machinery_are_internal(name: str) -> None:
    spec = find_spec(name)
    assert spec is not None
    assert spec.origin is not None
    assert stacks.is_internal(spec.origin)
    assert stacks.is_internal(str(Path(spec.origin).with_name("part") / "module.py"))


@pytest.mark.parametrize(
    "file",
    [
        "/home/ann/skymagic/.venv/lib/python3.11/site-packages/torch/autograd/graph.py",
        "/home/ann/skymagic/helpers.py",
        "/home/ann/asyncio/exercise.py",
    ],
    ids=["library-in-clone", "module-in-clone", "folder-of-same-name"],
)
def test_files_in_a_folder_of_the_same_name_are_not_internal(file: str) -> None:
    assert not stacks.is_internal(file)


def test_the_standard_library_is_not_internal_as_a_whole() -> None:
    assert stacks.is_internal(asyncio.base_events.__file__)
    assert not stacks.is_internal(os.__file__)


def test_frame_at_an_instruction_without_a_line() -> None:
    """Such instructions exist in `with` statements; Python then returns None as the line."""

    def caller() -> FrameType:
        return sys._getframe()

    frames = [caller()]
    caller.__code__ = caller.__code__.replace(co_linetable=b"")
    frames.append(caller())
    assert frames[1].f_lineno is None
    first = frames[1].f_code.co_firstlineno
    assert [stacks.plain(frame, {}).line for frame in frames] == [first + 1, first]
