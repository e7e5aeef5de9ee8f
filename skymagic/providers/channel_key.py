"""The key by which a pool's notebook and nodes know each other in sessions through a scheduler's channel (`ssh.sealed`).

It lies in the home folder of the notebook's side, mode 0600, before the scheduler is asked for nodes. Where the nodes share that folder, the
key never crosses the channel. The holder on each node, which the scheduler itself has started, leaves a mark beside it if it sees it:
somebody in between who pretends to be a node without that folder is refused then. A node that does not see it is trusted on first use,
and gets the key in its first session::

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
"""Runs a program where the home folder is, as `ssh.programs.Programs.run` does."""
FOLDER = "$HOME/.skymagic/channels"
MARK_TIMEOUT = 5.0
"""Seconds for which the mark of a node's holder is waited for, before a node without the key is trusted."""
SHARE = rf"""umask 077
find "{FOLDER}" -mindepth 1 -maxdepth 1 -mtime +7 -exec rm -rf {{}} + 2>/dev/null
mkdir -p "{FOLDER}/$0" && chmod 700 "{FOLDER}" "{FOLDER}/$0" && cat >"{FOLDER}/$0/key"
"""
"""sh that writes the key from its input; those of pools whose nodes have it long since are removed."""
MARKS = f'ls "{FOLDER}/$0"'
DROP = f'rm -rf "{FOLDER}/$0"'
MARK_SEEN = f"""if [ -r "{FOLDER}/@JOB@/key" ]; then : >"{FOLDER}/@JOB@/seen-${{dir##*/}}"; fi 2>/dev/null
"""
"""sh of a holder, whose folder is `dir`."""


class ChannelKey:
    """One pool's key, and which nodes have proven that they know it.

    Args:
        job_id: the pool's.
        run: runs programs on the machine whose home folder the nodes may share.
        secret: the key of a pool that another notebook has made; a new one unless given.
    """

    def __init__(self, job_id: str, run: Run, secret: str = "") -> None:
        self.job_id, self._run = job_id, run
        self.secret = secret or secrets.token_hex(32)
        self._first_use = not secret
        self._known = set[str]()
        """Nodes that have proven that they know the key, or have been given it."""
        self._shared = False
        """Whether a node has read it in the home folder."""
        self.unverified = set[str]()
        """Nodes that were trusted on first use."""
        self._lock = threading.Lock()

    def share(self) -> None:
        """Write the key into the home folder. A folder that cannot be written leaves trust on first use."""
        done = self._run("sh", "-c", SHARE, self.job_id, text=self.secret)
        if done.returncode:
            logger.warning("job=%s: the channel key is not shared: %s", self.job_id, done.stderr)

    def renew(self) -> None:
        """Expect new nodes in the place of all that there were."""
        with self._lock:
            self._known.clear()
            self.unverified.clear()
            self._first_use = True
        self.share()

    def drop(self) -> None:
        """Remove it from there; twice is safe."""
        try:
            self._run("sh", "-c", DROP, self.job_id)
        except ProvisionError as problem:
            logger.warning("job=%s: the channel key stays: %s", self.job_id, problem)

    # -- Trust ---------------------------------------------------------------------------------------------------------

    def check(self, node: str, claim: Mapping[str, str], seen: str) -> dict[str, str]:
        """Answer a node's claim. Raises UntrustedHost for a node that can prove nothing, and should."""
        knows, problem = claim.get("knows", ""), claim.get("problem", "")
        answer = {"proof": sealed.proof(self.secret, sealed.NOTEBOOK, seen)}
        if knows:
            expected = sealed.proof(self.secret, sealed.NODE, seen)
            if not hmac.compare_digest(claim.get("proof", "").encode(), expected.encode()):
                raise UntrustedHost(node, *self._wrong(knows))
            with self._lock:
                self._known.add(node)
                self._shared = self._shared or knows == sealed.SHARED
            return answer
        if problem:
            raise UntrustedHost(
                node,
                f"its channel key cannot be used: {problem}",
                "chmod 600 the file if nobody has changed it, then start the pool again",
            )
        if not self._first_use or node in self._known or self._shared or self._marked(node):
            raise UntrustedHost(
                node,
                "it does not know the pool's channel key, which it had or which lies in its home folder",
                f"the key was removed there, or somebody stands in for the node: end the pool with %sky_down {self.job_id} and start another",
            )
        return {"key": self.secret}

    def accepted(self, node: str) -> None:
        """The node has kept the key."""
        with self._lock:
            if node in self._known:
                return
            self._known.add(node)
            self.unverified.add(node)
        logger.warning("node=%s job=%s was trusted on first use", node, self.job_id)

    def _wrong(self, knows: str) -> tuple[str, str]:
        where = (
            f"~/.skymagic/channels/{self.job_id}/key"
            if knows == sealed.SHARED
            else "the folder of the job's holder"
        )
        return (
            f"it has proven another channel key than the pool's, which it has from {where}",
            "the file was changed, or somebody stands between this machine and the node: end the pool with "
            f"%sky_down {self.job_id} and start another",
        )

    def _marked(self, node: str) -> bool:
        """Return whether a holder has seen the key in the home folder, as any of its marks says; waits for one for a while."""
        deadline = time.monotonic() + MARK_TIMEOUT
        while True:
            if "seen-" in self._run("sh", "-c", MARKS, self.job_id).stdout:
                return True
            if time.monotonic() > deadline:
                return False
            time.sleep(0.5)
