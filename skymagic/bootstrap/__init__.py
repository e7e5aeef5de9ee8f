"""From an image to the shell text that sets a node up, and from what a node answers to facts; all of it pure.

A node keeps everything in one folder, `Facts.folder`::

    env/KEY/        an environment: interpreter and packages; `.ready` in it is written last
    code/DIGEST/    skymagic as it runs in the notebook; on PYTHONPATH, so that an edit installs nothing anew
    incoming/       what is being uploaded
    python/         interpreters that uv fetched
"""

from __future__ import annotations

from skymagic.bootstrap.facts import Facts, Python, parse
from skymagic.bootstrap.install import UPLOADED, Recipe, choose, install_script, prepare_script
from skymagic.bootstrap.probe import probe_script
from skymagic.bootstrap.progress import Listener
from skymagic.bootstrap.requirements import Wanted

__all__ = [
    "UPLOADED",
    "Facts",
    "Listener",
    "Python",
    "Recipe",
    "Wanted",
    "choose",
    "install_script",
    "parse",
    "prepare_script",
    "probe_script",
]
