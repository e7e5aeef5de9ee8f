"""What one process starts, or looks for, in another, by the module's name: the process boundaries that no import shows.

``python -m`` runs the first ten, each in a process of its own; a rank is forked, and what it runs is imported there.
`tests/test_house.py` reads this table: no other module names one of ours in a string.
"""

from __future__ import annotations

AGENT = "skymagic.kernels.agent.agent"
"""A node's agent on this machine: started by the notebook (`providers.local`)."""
ATTACH = "skymagic.kernels.daemon.attach"
"""The way to a node's daemon, which keeps its agent: started over each SSH connection (`providers.ssh`)."""
READ = "skymagic.kernels.daemon.read"
"""The way to a node's agent for those who only read (`pool.reader`)."""
CONTROLLER = "skymagic.kernels.agent.controller"
"""ipyparallel's controller: started by the head's agent."""
VALUES = "skymagic.kernels.store.server"
"""A node's value server: started by the notebook (`pool.resources`)."""
FILES = "skymagic.kernels.files"
"""A node's end of copying files: started by the notebook, once for each copy (`pool`)."""
CHECK = "skymagic.kernels.check"
"""A node's end of a check: started by the notebook, once for each check (`cluster.checking`)."""
TERMINAL = "skymagic.kernels.terminal"
"""A node's end of a terminal: started by the notebook, once for each (`cluster.terminal`)."""
START_NOTEBOOK = "skymagic.kernels.notebook.start"
"""What begins a notebook as a job on the head (`api.notebooks`)."""
FOLLOW_NOTEBOOK = "skymagic.kernels.notebook.follow"
"""The way to a notebook that is executed there, or was (`api.notebooks`)."""
RELAY = "skymagic.kernels.relay"
"""What starts processes on another node for the head, where a notebook is executed (`api.notebooks`)."""
RANK = "skymagic.kernels.rank.entry"
"""What a rank runs: imported by a node's forkserver before it forks."""
SCRIPT = "skymagic.kernels.script.script"
"""What a cell of %%sky_sh runs on a rank (`jobs.script`)."""
NOTEBOOK = "skymagic.jobs.notebook"
"""What gives the pool to the kernel of such a notebook: imported there, though it belongs to what runs in notebooks."""
