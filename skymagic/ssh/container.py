"""Containers on a node: find an engine, get the image, and start shells in containers.

`enter` makes all later shells of a connection run in containers::

    notebook ── channel ── sh on the node ── podman exec, apptainer exec, ch-run ── sh ── modules
                                 │
                                 └── first process (sh, a holder) ── daemon ── agent ── ranks

All containers of a node share its home folder, /tmp, /dev/shm, network, host name and process
numbers. The last is not podman's default. But with process numbers that only the container knows,
nothing outside could see or stop an agent, and `skymagic ps` and `skymagic stop` run on the node.

When the first process of a container has ended, the engine kills the other ones, or takes their
files away. A daemon outlives the shell that starts it. Therefore the shell of a first daemon starts
a container whose first process is a *holder* (`providers.holder.HOLDER`), which starts the daemons
(`kernels.fork.run_below_holder`). That container ends after the last daemon. In a scheduler's job,
the job's holder starts that container.
"""

from __future__ import annotations

import base64
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from shlex import quote

from skymagic.errors import HostError
from skymagic.plan.container import Container
from skymagic.ssh.host import HostConnection
from skymagic.ssh.process import Shell

logger = logging.getLogger(__name__)

START_TIMEOUT = 120.0
"""Seconds that a container may take to start; a large image may be on a slow file system."""
PASSED = (
    r"HOME|USER|LOGNAME|LANG|LC_\w*|TZ|\w*_proxy|\w*_PROXY|SSL_CERT_FILE|PIP_\w*|UV_\w*|"
    r"CUDA_VISIBLE_DEVICES|CUDA_DEVICE_ORDER|NCCL_\w*|GLOO_\w*|HF_\w*|SKYMAGIC_\w*"
)
"""Variables of the node that podman passes on; the other engines pass on all."""
FINAL_ERRORS = ("container-engine", "container-image")
"""Codes of errors that another attempt does not change."""
MARK = "@container "
"""Start of a line that `inspect` reads."""

SCRIPT = r"""
refuse() { echo "skymagic: $*" >&2; exit 125; }

# The first engine that is here: its name in $engine, its program in $program.
find_engine() {
    if [ -n "${SKYMAGIC_HOLDER-}" ]; then
        await_job
        PATH=$PATH:$(cat "$SKYMAGIC_HOLDER/path" 2>/dev/null)
    fi
    PATH=$PATH:/usr/local/bin:/usr/bin:/bin
    : "${USER:=$(id -un 2>/dev/null || id -u)}"
    export PATH USER HOME
    for engine in $engines; do
        program=$engine
        if [ "$engine" = charliecloud ]; then program=ch-run; fi
        if command -v "$program" >/dev/null 2>&1; then break; fi
        engine=
    done
    if [ -z "$engine" ]; then return 1; fi
    case $image in
        '~/'*) image=$HOME/${image#'~/'} ;;
    esac
    case $engine in
        podman) image=${image#docker://}; qualify ;;
        charliecloud) image=${image#docker://} ;;
    esac
    file=$image
    case $engine:$image in
        *:/*) ;;
        apptainer:* | singularity:*)
            # An engine that is given a name looks it up at each start; so it gets a file.
            case $image in *://*) ;; *) image=docker://$image ;; esac
            file=$home/containers/$(printf %s "$image" | tr -c 'A-Za-z0-9._-' _).sif ;;
    esac
}

# podman may be set up to look nowhere for a name without a registry.
qualify() {
    case $image in
        /* | localhost/*) ;;
        *.*/* | *:*/*) ;;
        *)
            if podman image exists "$image"; then return; fi
            case $image in
                */*) image=docker.io/$image ;;
                *) image=docker.io/library/$image ;;
            esac ;;
    esac
}

# The scheduler starts the job's holder, which has run what the site's jobs begin with.
await_job() {
    tries=0
    until [ -p "$SKYMAGIC_HOLDER/start" ] || [ $tries -gt 300 ]; do
        tries=$((tries + 1))
        sleep 0.1 2>/dev/null || sleep 1
    done
    [ -O "$SKYMAGIC_HOLDER/start" ] || refuse "the job's holder is not here"
}

has_image() {
    case $engine:$file in
        *:/*) [ -e "$file" ] ;;
        podman:*) podman image exists "$image" ;;
        charliecloud:*) ch-image list 2>/dev/null | grep -qxF "$image" ;;
    esac
}

# Hosts may share the folder: the file gets its name once it is whole.
pull() {
    case $engine in
        podman) podman pull --quiet "$image" </dev/null ;;
        charliecloud) ch-image pull "$image" </dev/null ;;
        *)
            mkdir -p "$home/containers" || return
            part=$home/containers/.part.$(uname -n).$$
            "$program" pull "$part" "$image" </dev/null && mv -f "$part" "$file" && return
            rm -rf "$part"
            return 1 ;;
    esac
}

has_gpus() { [ -e /dev/nvidiactl ] && [ "$gpus" = yes ]; }

has_cdi() {
    for one in /etc/cdi/*.yaml /etc/cdi/*.json /var/run/cdi/*.yaml /var/run/cdi/*.json; do
        if [ -f "$one" ]; then return; fi
    done
    return 1
}

tell() { printf '@container %s\n' "$*"; }

inspect() {
    find_engine || { tell engine; exit; }
    tell engine "$engine"
    if has_image; then tell image; fi
    if has_gpus && [ "$engine" = podman ] && ! has_cdi; then tell cdi; fi
}

fetch() {
    find_engine || exit 1
    if has_image; then exit 0; fi
    pull
}

# /bin/sh ARGUMENTS: run it as the first process of a container, in place of this shell.
contain() {
    case $engine in
        podman) in_podman "$@" ;;
        charliecloud) in_charliecloud "$@" ;;
        *) in_apptainer "$@" ;;
    esac
}

# FUNCTION: call it with each folder to show in $from, and its name in the container in $to.
each_bind() {
    mkdir -p "$home" 2>/dev/null
    for bind in /tmp "$HOME" "$home" $binds; do
        case $bind in '~'*) bind=$HOME${bind#'~'} ;; esac
        from=${bind%%:*} to=${bind#*:}
        # below a folder that is shown anyway
        case $bind in /tmp | "$HOME") ;; *:*) ;; "$HOME"/* | /tmp/*) continue ;; esac
        if [ "$from" != / ]; then "$1"; fi
    done
}

# Add an option for each of the node's variables that podman passes on.
pass_variables() {
    for one in $(env | sed -nE "s/^($passed)=.*/\1/p"); do options="$options --env=$one"; done
}

in_podman() {
    more() { options="$options --volume=$from:$to"; }
    # podman's own /dev/shm has 64 MB; --ipc=host would need /dev/mqueue, too
    options=--volume=/dev/shm:/dev/shm
    each_bind more
    pass_variables
    if [ "$(id -u)" != 0 ]; then options="$options --userns=keep-id"; fi
    if has_gpus && has_cdi; then options="$options --device=nvidia.com/gpu=all"; fi
    if [ -n "$named" ]; then options="$options --name=$named"; fi
    case $file in
        /*) options="$options --rootfs"; image=$file:O ;;
        *) options="$options --pull=never" ;;
    esac
    shift
    exec podman run --rm --interactive --network=host --uts=host --pid=host \
        --user="$(id -u):$(id -g)" --security-opt=label=disable --pids-limit=-1 \
        --workdir="$HOME" --entrypoint=/bin/sh $options "$image" "$@"
}

in_podman_of_holder() {
    options=
    pass_variables
    exec podman exec --interactive --workdir="$HOME" $options "$name" "$@"
}

in_apptainer() {
    more() { options="$options --bind=$from:$to"; }
    # sites may turn off what is shown by default
    options="--bind=/dev/shm"
    each_bind more
    if has_gpus; then options="$options --nv"; fi
    unset LD_LIBRARY_PATH PYTHONHOME PYTHONPATH
    exec "$program" exec $options --pwd="$HOME" "$file" "$@"
}

# A folder can be shown only where the image has one of this name. Newer versions make it in a layer
# above the image; else it is made in the image, if that is a folder of the user's.
in_charliecloud() {
    more() {
        if [ -d "$file" ] && [ -z "$layer" ]; then mkdir -p "$file$to" 2>/dev/null; fi
        options="$options --bind=$from:$to"
    }
    layer=$(ch-run --help 2>&1 | sed -n 's/.* \(--write-fake\).*/\1/p')
    options=$layer
    each_bind more
    if [ -e "$file/ch/environment" ] || [ "${file#/}" = "$file" ]; then
        options="$options --set-env"
    fi
    PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
    exec "$(command -v ch-run)" --unset-env=LD_LIBRARY_PATH --unset-env='PYTHON*' $options \
        --cd="$HOME" "$file" -- "$@"
}

# A shell for a channel, which leads its session, so that all that it starts can be signalled.
begin='export PYTHONNOUSERSITE=1
read -r stat </proc/$$/stat; set -- ${stat##*) }
[ "$3" = $$ ] || ! command -v setsid >/dev/null || exec setsid /bin/sh -s
exec /bin/sh -s'

shell() {
    find_engine || refuse "no $engines is here"
    if [ -n "$name" ]; then
        if [ "$1" = lasting ]; then keep; fi
        SKYMAGIC_HOLDER=$holder
        export SKYMAGIC_HOLDER
        if [ "$engine" = podman ] && podman container exists "$name"; then
            in_podman_of_holder /bin/sh -c "$begin"
        fi
    fi
    contain /bin/sh -c "$begin"
}

# Start the container that daemons run in, unless it runs.
keep() {
    if held; then return; fi
    work=$(mktemp -d /tmp/skymagic-container-XXXXXX) || exit
    printf '%s' "$text" >"$work/text"
    order="exec </dev/null >/dev/null 2>'$work/errors'
/bin/sh -c \"\$(cat '$work/text')\" sh hold; echo \$? >'$work/status'"
    if [ -n "${SKYMAGIC_HOLDER-}" ]; then
        printf '%s\n' "$order" >"$SKYMAGIC_HOLDER/$name-container" &&
            echo "$name-container" >"$SKYMAGIC_HOLDER/start" || refuse "the job has ended"
    else
        setsid /bin/sh -c "$order" </dev/null >/dev/null 2>&1 &
    fi
    tries=0
    until held; do
        tries=$((tries + 1))
        # another shell may have been faster: then its container counts
        if [ -e "$work/status" ] && [ $tries -gt 20 ]; then
            cat "$work/errors" >&2
            rm -rf "$work"
            refuse "the container has ended"
        fi
        if [ $tries -gt 1200 ]; then rm -rf "$work"; refuse "the container does not start"; fi
        sleep 0.1 2>/dev/null || sleep 1
    done
    rm -rf "$work"
}

held() { [ -p "$holder/start" ] && [ -O "$holder/start" ]; }

hold() {
    find_engine || refuse "no $engines is here"
    named=$name
    unset SKYMAGIC_HOLDER
    contain /bin/sh -c "$holding"
}

named=
"$@"
"""
"""Functions of a node's shell. The first argument names the one to call.

- `_settings` sets the variables: ``engines`` and ``image`` as the user wants them; ``binds``;
  ``gpus``, whether to show GPUs; ``home``, skymagic's folder; ``name``, the container of the pool's
  daemons, or "" for none; ``holder`` and ``holding``, the folder and the script of its first
  process; ``passed``, see `PASSED`.
- ``text`` holds the whole script: the process that keeps the container runs it again.
- No value that is split into words may contain blanks: `plan.container` refuses them in folders,
  and a home folder with blanks does not work with all of the engines either.
"""


def _settings(container: Container, home: str, gpus: bool, name: str, holding: str) -> str:
    values = {
        "engines": " ".join(container.engines),
        "image": container.image,
        "binds": " ".join(container.binds),
        "gpus": "yes" if gpus else "",
        "passed": PASSED.replace(r"\w", "[A-Za-z0-9_]"),
        "name": name and f"skymagic-{name}",
        "holder": container_holder(name),
        "holding": holding,
    }
    # the node's shell knows its home folder, the notebook does not
    lines = [f"{key}={quote(value)}" for key, value in values.items()]
    folder = quote(home) if home else '"${SKYMAGIC_HOME:-$HOME/.skymagic}"'
    return "\n".join([*lines, f"home={folder}"])


def container_holder(name: str) -> str:
    """Return the folder of the holder in a container, see `SKYMAGIC_HOLDER`."""
    return f"/tmp/skymagic-holder-{name}-container" if name else ""


@dataclass(frozen=True)
class ContainerShells:
    """Settings of the shells that start in a node's container.

    Attributes:
        container: the image and its engine, "" for any that the node has.
        home: skymagic's folder on the node; "" for the node's own setting.
        gpus: whether the container shows the node's GPUs.
        name: name of the pool's daemon on the node; "" before the pool has any.
        holding: script of the container's first process.
    """

    container: Container
    home: str = ""
    gpus: bool = True
    name: str = ""
    holding: str = ""

    def script(self) -> str:
        """Return sh whose arguments are a function of `SCRIPT` and its arguments."""
        return f"{_settings(self.container, self.home, self.gpus, self.name, self.holding)}{SCRIPT}"

    def command(self, *call: str) -> str:
        """Return a command line for any login shell; it calls a function of the script."""
        # base64: neither a quote nor a newline, which fish and csh read in ways of their own
        encoded = base64.b64encode(self.script().encode()).decode()
        return (
            f"exec /bin/sh -c 'text=$(echo {encoded} | base64 -d); eval \"$text\"' sh "
            f"{' '.join(call)}"
        )

    def shell(self, lasting: bool = False) -> Shell:
        """Return a shell in the container.

        Args:
            lasting: start the container of daemons unless it runs.
        """
        call = ("shell", "lasting") if lasting else ("shell",)
        return Shell(self.command(*call), "the container", START_TIMEOUT)


def enter(connection: HostConnection, shells: ContainerShells) -> None:
    """Let all further processes of a connection run in containers."""
    connection.shell = shells.shell()
    connection.lasting_shell = shells.shell(lasting=True)


def prepare(
    connection: HostConnection,
    shells: ContainerShells,
    report: Callable[[str], None],
) -> ContainerShells:
    """Find the engine on a node and get the image, and return shells with that engine.

    The connection itself must not be in a container yet.

    Args:
        report: called with a line of text for each step.

    Raises:
        HostError: the node has no engine, or the image does not exist.
    """
    with_engine, has_image = find_engine(connection, shells, report)
    if not has_image:
        _pull(connection, with_engine, report)
    return with_engine


def find_engine(
    connection: HostConnection, shells: ContainerShells, report: Callable[[str], None]
) -> tuple[ContainerShells, bool]:
    """Find the engine on a node; return the shells with it, and whether the image is there.

    Changes nothing on the node. Raises HostError if the node has no engine, or if the image is a
    file that does not exist.
    """
    request = shells.container
    result = connection.run(_script(shells, "inspect"), timeout=60.0)
    lines = [
        line.removeprefix(MARK).split() for line in result.out.splitlines() if line.startswith(MARK)
    ]
    # a profile may print lines of its own between ours
    facts = {fields[0]: fields[1:] for fields in lines if fields}
    if not facts.get("engine"):
        raise HostError(connection.label, *_no_engine(request), code="container-engine")
    # later shells do not search again, and all of a pool's shells use one engine
    container = replace(request, engine=facts["engine"][0])
    with_engine = replace(shells, container=container)
    if "cdi" in facts:
        report(
            "containers of podman have none of its GPUs, because they are not described for it: "
            "run `sudo nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml` there"
        )
    if "image" not in facts and container.is_file:
        raise HostError(
            connection.label,
            f"the image {container.image} is not there",
            "copy it there, or write the name of an image in a registry",
            code="container-image",
        )
    return with_engine, "image" in facts


def _pull(
    connection: HostConnection, shells: ContainerShells, report: Callable[[str], None]
) -> None:
    container = shells.container
    report(f"pulling {container.image} with {container.engine}")
    logger.info("image is pulled: host=%s engine=%s", connection.label, container.engine)
    # no timeout: an image has up to 20 GB, and its user can press stop
    result = connection.run(_script(shells, "fetch"))
    if result.status != 0:
        # engines print their progress first, and the reason at the end
        last = "\n".join((result.err.strip() or result.out.strip()).splitlines()[-6:])
        raise HostError(
            connection.label,
            f"{container.engine} could not pull {container.image}"
            + (f":\n{last}" if last else f" (exit code {result.status})"),
            _PULL_REMEDIES[container.engine],
            code="container-image",
        )


_PULL_REMEDIES = {
    "podman": "check the name; a private registry needs `podman login` there first",
    "charliecloud": "check the name, and that ch-image is installed there (charliecloud-builders)",
    "apptainer": "check the name; a private registry needs `apptainer registry login` there first",
    "singularity": "check the name; a private registry needs `singularity remote login` there",
}


def _script(shells: ContainerShells, call: str) -> str:
    return f"set -- {call}\n{shells.script()}"


def _no_engine(container: Container) -> tuple[str, str]:
    """Return the reason and the remedy if a node has none of the engines."""
    names = " or ".join(container.engines)
    # the user has named the engine, or the kind of image leaves no choice
    reason = f"{names} is not there, and --container {container} needs it"
    if len(container.engines) > 1:
        reason = (
            f"none of {', '.join(container.engines)} is there, and --container {container} "
            "needs one of them"
        )
    remedy = (
        "install one, or load it where the node's logins begin (`module load apptainer` in "
        "~/.bashrc); or leave --container out"
    )
    return reason, remedy
