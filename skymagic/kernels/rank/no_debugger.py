"""Keep debugpy out of a rank: import this module before anything of ipykernel.

ipykernel imports debugpy for the front end's debugger, which cannot reach a rank; that would take
half of a rank's start. ipykernel 6.17 does so in `ipykernel.ipkernel`, later ones in `kernelapp`.
"""

from __future__ import annotations

import sys
import types

_no_debugger = types.ModuleType("ipykernel.debugger", "What a rank has in its place")
_no_debugger.__dict__.update(_is_debugpy_available=False, Debugger=object)
sys.modules[_no_debugger.__name__] = _no_debugger
