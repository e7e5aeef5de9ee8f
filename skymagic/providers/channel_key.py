"""The key that authenticates a pool's notebook and nodes in a scheduler's channel (`ssh.sealed`).

The notebook's side writes it to its home folder, mode 0600, before it requests nodes. If the nodes
share that folder, the key never crosses the channel. The holder on each node, which the scheduler
itself has started, leaves a mark next to the key if it sees it. An impostor that pretends to be a
node without that folder is then refused. A node that does not see the key is trusted on first use
and receives the key in its first session::

    ~/.skymagic/channels/JOB/key         by the notebook's side
    ~/.skymagic/channels/JOB/seen-NODE   by a holder that has read it
"""

from __future__ import annotations

import hmac
import logging
import secrets
import subprocess
import threading
import time
from collections.abc import Callable, Mapping

from skymagic.errors import ProvisionError
from skymagic.ssh.sealed import UntrustedHost
from skymagic.wire import sealed

logger = logging.getLogger(__name__)
Run = Callable[..., subprocess.CompletedProcess[str]]
"""Runs a program on the machine with the home folder, like `ssh.programs.Programs.run`."""
FOLDER = "$HOME/.skymagic/channels"
MARK_TIMEOUT = 5.0
"""Seconds to wait for the mark of a node's holder before trusting a node without the key."""
SHARE = rf"""umask 077
find "{FOLDER}" -mindepth 1 -maxdepth 1 -mtime +7 -exec rm -rf {{}} + 2>/dev/null
mkdir -p "{FOLDER}/$0" && chmod 700 "{FOLDER}" "{FOLDER}/$0" && cat >"{FOLDER}/$0/key"
"""
"""Script that writes the key from its input, and removes keys that are more than a week old."""
MARKS = f'ls "{FOLDER}/$0"'
DROP = f'rm -rf "{FOLDER}/$0"'
MARK_SEEN = f"""if [ -r "{FOLDER}/@JOB@/key" ]; then
    : >"{FOLDER}/@JOB@/seen-${{dir##*/}}"
fi 2>/dev/null
"""
"""Part of the holder script, whose folder is `dir`."""


class ChannelKey:
    """Key of one pool, and the nodes that have proven that they know it.

    Args:
        job_id: job ID of the pool.
        run: runs programs on the machine whose home folder the nodes may share.
        secret: key of a pool that another notebook created; generated if empty.
    """

    def __init__(self, job_id: str, run: Run, secret: str = "") -> None:
        self.job_id, self._run = job_id, run
        self.secret = secret or secrets.token_hex(32)
        self._first_use = not secret
        self._known = set[str]()
        """Nodes that have proven that they know the key, or have received it."""
        self._shared = False
        """True once a node has read the key in the home folder."""
        self.unverified = set[str]()
        """Nodes that were trusted on first use."""
        self._lock = threading.Lock()

    def share(self) -> None:
        """Write the key to the home folder. If that fails, trust on first use remains."""
        done = self._run("sh", "-c", SHARE, self.job_id, text=self.secret)
        if done.returncode:
            logger.warning("job=%s: the channel key is not shared: %s", self.job_id, done.stderr)

    def renew(self) -> None:
        """Expect new nodes that replace all previous ones."""
        with self._lock:
            self._known.clear()
            self.unverified.clear()
            self._first_use = True
        self.share()

    def drop(self) -> None:
        """Remove the key from the home folder. Twice is safe."""
        try:
            self._run("sh", "-c", DROP, self.job_id)
        except ProvisionError as problem:
            logger.warning("job=%s: the channel key stays: %s", self.job_id, problem)

    # -- Trust -------------------------------------------------------------------------------------

    def check(
        self, node: str, claim: Mapping[str, str], session_fingerprint: str
    ) -> dict[str, str]:
        """Answer a node's claim.

        Raises UntrustedHost for a node that should be able to prove its identity and cannot.
        """
        knows, problem = claim.get("knows", ""), claim.get("problem", "")
        answer = {"proof": sealed.proof(self.secret, sealed.NOTEBOOK, session_fingerprint)}
        if knows:
            expected = sealed.proof(self.secret, sealed.NODE, session_fingerprint)
            if not hmac.compare_digest(claim.get("proof", "").encode(), expected.encode()):
                raise UntrustedHost(node, *self._problem(knows), code="channel-untrusted")
            with self._lock:
                self._known.add(node)
                self._shared = self._shared or knows == sealed.SHARED
            return answer
        if problem:
            raise UntrustedHost(
                node,
                f"its channel key cannot be used: {problem}",
                "chmod 600 the file if nobody has changed it, then start the pool again",
                code="channel-untrusted",
            )
        if not self._first_use or node in self._known or self._shared or self._has_mark(node):
            raise UntrustedHost(
                node,
                "it does not know the pool's channel key, which it had or which lies in its home "
                "folder",
                "the key was removed there, or somebody stands in for the node: end the pool with "
                f"%sky_down {self.job_id} and start another",
                code="channel-untrusted",
            )
        return {"key": self.secret}

    def accepted(self, node: str) -> None:
        """Record that a node has stored the key."""
        with self._lock:
            if node in self._known:
                return
            self._known.add(node)
            self.unverified.add(node)
        logger.warning("node=%s job=%s was trusted on first use", node, self.job_id)

    def _problem(self, knows: str) -> tuple[str, str]:
        location = (
            f"~/.skymagic/channels/{self.job_id}/key"
            if knows == sealed.SHARED
            else "the folder of the job's holder"
        )
        return (
            f"it has proven another channel key than the pool's, which it has from {location}",
            "the file was changed, or somebody stands between this machine and the node: "
            f"end the pool with %sky_down {self.job_id} and start another",
        )

    def _has_mark(self, node: str) -> bool:
        """Return True if any holder has left its mark next to the key. Waits a while for one."""
        deadline = time.monotonic() + MARK_TIMEOUT
        while True:
            if "seen-" in self._run("sh", "-c", MARKS, self.job_id).stdout:
                return True
            if time.monotonic() > deadline:
                return False
            time.sleep(0.5)
