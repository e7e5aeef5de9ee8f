"""Holders: processes that start a node's daemons where a daemon cannot outlive what starts it.

That is so for the steps of a scheduler's job, and for containers. `kernels.fork` has the other end.
"""

from __future__ import annotations

from skymagic.providers.channel_key import MARK_SEEN
from skymagic.ssh.container import container_holder

HOLDER_SECONDS = 3600
"""Seconds that a job waits for its first daemon: if the notebook is killed, the job ends then."""
HOLDER = r"""umask 077
find /tmp -maxdepth 1 -name 'skymagic-holder-*' -user "$(id -u)" -mtime +7 \
    -exec rm -rf {} + 2>/dev/null
sweep() {
    for run in /tmp "$HOME/.skymagic/run" "${TMPDIR:-/var/tmp}"; do
        [ -s "$run/$name/daemon.log" ] || rm -rf "$run/$name"
    done
}
running=0 ending= alone=
trap 'ending=1; echo >&3' HUP INT TERM
dir=@DIR@
if ! mkdir "$dir" 2>/dev/null; then
    # /tmp is everybody's: if another user has taken the name first, use one that nobody can guess
    if [ -d "$dir" ] && [ -O "$dir" ] && [ ! -L "$dir" ]; then exit 1; fi
    dir=$(mktemp -d "$dir+XXXXXX") || exit 1
fi
trap 'rm -rf "$dir"; kill $alone 2>/dev/null' EXIT
@SEEN@command -v python3 >"$dir/python"
printf '%s\n' "$PATH" >"$dir/path"
# rename it only once it is open, so that a writer never blocks
mkfifo "$dir/.start" && exec 3<>"$dir/.start" && mv "$dir/.start" "$dir/start" || exit 1
(trap 'kill $!; exit' TERM; sleep @SECONDS@ 3>&- & wait; echo '?' >&3) & alone=$!
for name in $(env | sed -n 's/^\(SLURM_[A-Z0-9_]*\|PMI[X_][A-Z0-9_]*\)=.*/\1/p'); do
    [ "$name" = SLURM_CONF ] || unset "$name"
done
while [ -z "$ending" ] || [ "$running" -gt 0 ]; do
    read -r name <&3 || continue
    case $name in
        '') ;;
        '?') [ "$running" -gt 0 ] || ending=1 ;;
        -) running=$((running - 1)); [ "$running" -gt 0 ] || ending=1 ;;
        *)
            running=$((running + 1))
            (trap : HUP INT TERM; /bin/sh "$dir/$name" 3>&-; sweep; echo - >&3) &
            ;;
    esac
done
"""
"""Script that runs on each node and holds it for the pool.

It starts the daemons whose names it reads from its pipe (descriptor 3), and ends after the last
one, or with the job.

- The folder (``dir``) has mode 0700. It contains ``start``, the named pipe; ``python``, the path of
  the job's interpreter; ``path``, the job's PATH, where engines of containers may be; and a script
  for each daemon, put there by `kernels.fork`, which then writes the script's name to the pipe. The
  ``EXIT`` trap removes the folder. Old folders of holders that were killed are removed at the
  start.
- ``exec 3<>`` opens both ends of the pipe: `read` then never sees an end of file when a writer
  closes its end, and opening does not wait for a writer.
- ``running`` counts the daemons. ``ending`` is set by a signal. ``alone`` is the background process
  that ends a holder without daemons; its trap ends its ``sleep`` with it.
- Each daemon runs in a background subshell that survives the job's signals (``trap :``); the
  daemon gets these signals and handles them itself. ``3>&-`` closes the pipe, which it must not
  hold.
- A scheduler ends a job by a signal to all of its processes. The holder then waits until its
  daemons have ended, because a Slurm step kills the others when its first process has ended.
- When a daemon ends, ``-`` is written to the pipe. A signal writes an empty line, so that `read`
  returns. A background process writes ``?`` after `HOLDER_SECONDS`; if no daemon runs then, the
  holder ends.
- A daemon that is killed before it handles signals leaves its folder behind; ``sweep`` removes it
  unless the daemon has written a log there.
- ``@SEEN@`` becomes `MARK_SEEN` for a pool with a channel key, and nothing for others.
- Daemons get no SLURM_* variables, which frameworks would take for those of a launcher (Lightning
  issue 18650).
"""


def holder_folder(job_id: str, node: str) -> str:
    """Return the holder's folder on a node, to be set as `SKYMAGIC_HOLDER` in the channel's shell.

    If another user has taken that name, the holder appends a plus sign and random letters
    (`kernels.fork.holder`).
    """
    return f"/tmp/skymagic-holder-{job_id}-{node}"


def holder_script(folder: str, sealed_job: str = "", seconds: int = HOLDER_SECONDS) -> str:
    """Return `HOLDER` with its folder filled in, as an sh expression.

    Args:
        sealed_job: job ID of a pool whose channels are encrypted with a key; the holder then leaves
            a mark if it can read the key. "" for other pools.
        seconds: see `HOLDER_SECONDS`.
    """
    mark_seen = MARK_SEEN.replace("@JOB@", sealed_job) if sealed_job else ""
    text = HOLDER.replace("@DIR@", folder).replace("@SECONDS@", str(seconds))
    return text.replace("@SEEN@", mark_seen)


CONTAINER_HOLDER_SECONDS = 60
"""Seconds that a node's container waits for its first daemon, which follows at once."""


def container_holder_script(daemon: str) -> str:
    """Return the script of the first process of a node's container.

    Args:
        daemon: name of the node's daemon.
    """
    script = holder_script(container_holder(daemon), seconds=CONTAINER_HOLDER_SECONDS)
    # packages that the user has installed into the home folder do not fit the image's
    return f"export PYTHONNOUSERSITE=1\n{script}"
