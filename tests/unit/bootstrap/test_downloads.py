"""How far an installer is, by what uv prints."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from skymagic.bootstrap.progress import Downloads, InstallProgress, InstallStep

SIZES = {"torch": 700, "numpy": 200, "typing-extensions": 100}
UV = (
    "Resolved 3 packages in 120ms",
    "Downloading numpy (15.6MiB)",
    "Downloading torch (175.0MiB)",
    " Downloaded numpy",
    " Downloaded torch",
    "Prepared 3 packages in 4.2s",
)


@pytest.mark.parametrize(
    ("lines", "shares"),
    [
        (UV, [None, 0.0, 0.0, 0.2, 0.9, 1.0]),
        (("Downloaded other", "Downloading numpy (1MiB)"), [0.0, 0.0]),
    ],
    ids=["uv", "others"],
)
def test_share_counts_downloaded_planned_bytes(
    lines: Sequence[str], shares: list[float | None]
) -> None:
    downloads = Downloads(SIZES)
    assert [downloads.feed(line) for line in lines] == [
        share if share is None else pytest.approx(share) for share in shares
    ]


def test_no_share_without_known_sizes() -> None:
    downloads = Downloads({})
    assert {downloads.feed(line) for line in UV} == {None}


def test_the_steps_that_are_shown_have_their_share() -> None:
    said: list[str] = []
    progress = InstallProgress(said.append, sizes=SIZES)
    for line in UV:
        progress.feed(line)
    shares = {str(step): step.share for step in said if isinstance(step, InstallStep)}
    assert shares["Downloaded torch"] == pytest.approx(0.9)
    assert shares["Resolved 3 packages in 120ms"] is None
