"""Copying between the notebook and the nodes: put, get, and folders kept in step.

ignore    what .gitignore leaves behind
landing   where a source lands, as cp and rsync would have it
lines     one line to each node; all of them at once
porter    put, get, sync
words     what was done, and what went wrong
"""

from skymagic.files.copy import Files
from skymagic.files.messages import Copied, summary

__all__ = ["Copied", "Files", "summary"]
