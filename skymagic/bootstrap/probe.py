"""probe.sh, the script that gathers a host's facts in one round trip and changes nothing."""

from __future__ import annotations

from shlex import quote

from skymagic.bootstrap.builds import TORCH_INDEX
from skymagic.bootstrap.requirements import TORCH, Requirements
from skymagic.bootstrap.shell import TELL, UV_SETTINGS, assignments
from skymagic.plan import gpus
from skymagic.plan.image import project

PYTHON_PROBE = "import sys; print('%d.%d %s' % (*sys.version_info[:2], sys.executable))"
"""Code run by each interpreter: print its version and its path."""

PACKAGES_PROBE = """
import os, re
left = {re.sub('[-_.]+', '-', name).lower(): name for name in sys.argv[1:]}
for folder in sys.path[1:]:
    for one in os.listdir(folder) if left and os.path.isdir(folder) else ():
        name, _, version = one[:-10].partition('-')
        name = re.sub('[-_.]+', '-', name).lower()
        if one.endswith('.dist-info') and name in left:
            print('@sky package', left.pop(name), version)
if left:
    import importlib.metadata as m
for name in left.values():
    try:
        print('@sky package', name, m.version(name))
    except m.PackageNotFoundError:
        pass
"""
"""Code to run after `PYTHON_PROBE` in an interpreter used unchanged; reports packages by name.

Folder names answer this immediately. Importing the module that reads the metadata takes longer than
the whole rest of the probe.
"""

ANSWER_SECONDS = 8
"""Seconds that all indexes of a host together have to answer. Indexes that do not are left out."""

INDEXES_PROBE = """
import os, ssl, sys, threading, time
from urllib import error, parse, request
seconds, begun = float(sys.argv[1]), time.monotonic()
answered, silent = set(), {}

def bare(url):
    parts = parse.urlsplit(url)
    return parse.urlunsplit(parts._replace(netloc=parts.netloc.rpartition('@')[2])).rstrip('/')

def ask(url):
    try:
        if not url.startswith('file:'):
            page = request.Request(bare(url) + '/packaging/', headers={'User-Agent': 'skymagic'})
            request.urlopen(page, timeout=seconds).close()
    except Exception as problem:
        reason = getattr(problem, 'reason', problem)
        if not isinstance(problem, error.HTTPError) and not isinstance(reason, ssl.SSLError):
            if 'timed out' not in str(reason):
                silent[url] = str(reason)
            return
    answered.add(url)

indexes = list(dict.fromkeys(os.environ.get('SKY_INDEXES', '').split()))
threads = [threading.Thread(target=ask, args=(url,), daemon=True) for url in indexes]
for each in threads:
    each.start()
for each in threads:
    each.join(max(0, begun + seconds - time.monotonic()))
for url in indexes:
    if url not in answered:
        print('@sky silent', bare(url), silent.get(url, 'no answer in %.0f s' % seconds))
print('@sky indexes', len(answered))
sys.stdout.flush()
os._exit(0)
"""
"""Code run by an interpreter of the host (3.6 or newer) to query its package indexes.

It reports which of them do not answer. An index that refuses, or whose certificate is not trusted,
does answer, and uv reports the error.
URLs are passed in an environment variable, because they may hold passwords and all users can see a
command line.
"""

SOURCES_PROBE = """
import os, socket, sys, threading, time
from urllib.parse import urlsplit
end = time.monotonic() + float(sys.argv[1])
places = [urlsplit(url) for url in sys.argv[2:]]
def ask(place):
    if place.scheme in ('http', 'https'):
        port = place.port or {'http': 80}.get(place.scheme, 443)
        socket.create_connection((place.hostname, port), end - time.monotonic()).close()
    os._exit(0)
asked = [threading.Thread(target=ask, args=(place,), daemon=True) for place in places]
for each in asked:
    each.start()
for each in asked:
    each.join(max(0, end - time.monotonic()))
print('@sky unreached', ', '.join(place.hostname for place in places))
sys.stdout.flush()
os._exit(0)
"""
"""Code run by an interpreter of the host to test the sources that uv fetches Python from.

It reports them if none can be reached. Arguments: seconds, URLs.
"""

_BODY = r"""
main() {
    cd /  # a home may hold a random.py
    unset PYTHONHOME PYTHONPATH
    LC_ALL=C PATH=$PATH:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin
    export LC_ALL PATH
    tell system "$(uname -s)"
    tell machine "$(uname -m)"
    tell hostname "$(uname -n)"
    tell home "${HOME-}"
    tell user "$(id -un 2>/dev/null || id -u)"
    tell uid "$(id -u)"
    tell clock "$(date +%s)"
    tell boot "$(cat /proc/sys/kernel/random/boot_id 2>/dev/null)"
    tell libc "$(libc)"
    tell cpus "$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)"
    tell memory_kb "$(memory_kb)"
    tell descriptors "$(ulimit -Hn 2>/dev/null)"
    tell folder "$folder"
    place "$folder"
    if [ -d /dev/shm ] && [ -w /dev/shm ]; then tell shm_kb "$(free_kb /dev/shm)"; fi
    gpus
    addresses
    if [ -d "$folder/code/$code" ]; then tell code "$code"; fi
    case $want in
        /*) prepared ;;
        *) environment ;;
    esac
    tell end
}

libc() {
    getconf GNU_LIBC_VERSION 2>/dev/null && return
    case $(ldd --version 2>&1) in *musl*) echo musl ;; esac
}

memory_kb() {
    if [ -r /proc/meminfo ]; then
        sed -n 's/^MemTotal: *\([0-9]*\).*/\1/p' /proc/meminfo
    else
        echo $(($(sysctl -n hw.memsize 2>/dev/null || echo 0) / 1024))
    fi
}

free_kb() { df -Pk "$1" 2>/dev/null | sed -n '2,$s/.* \([0-9][0-9]*\)  *[0-9-]*%.*/\1/p'; }

# What can be done in the folder, or, before there is one, in the nearest that is there.
place() {
    at=$1
    while [ ! -d "$at" ]; do
        case $at in */*) at=${at%/*} ;; *) at= ;; esac
        if [ -z "$at" ]; then at=/; fi
    done
    tell disk_kb "$(free_kb "$at")"
    if [ -d "$1" ]; then
        mode=$(ls -ldL "$1")
        if [ ! -O "$1" ]; then tell foreign "$mode"; fi
        case $mode in ?????w* | ????????w*) tell exposed "$mode" ;; esac
    fi
    trial=$at/.skymagic-trial.$$
    # cat says why it cannot write; a shell's own printf says "I/O error" of a full disk
    if refusal=$( (umask 077 && printf '#!/bin/sh\nexit 0\n' | cat >"$trial") 2>&1); then
        chmod 700 "$trial"
        if "$trial" 2>/dev/null; then :; else tell noexec "$at"; fi
    else
        tell refusal $refusal
    fi
    rm -f "$trial" 2>/dev/null
}

gpus() {
    if [ -e /dev/kfd ] || command -v rocm_agent_enumerator >/dev/null 2>&1; then
        accelerated=rocm
        tell rocm
    fi
    if [ -r /sys/module/nvidia/version ]; then
        accelerated=cuda
        tell driver "$(cat /sys/module/nvidia/version)"
    fi
    command -v nvidia-smi >/dev/null 2>&1 || return 0
    bounded=
    if command -v timeout >/dev/null 2>&1; then bounded="timeout 20"; fi
    table=--format=csv,noheader,nounits
    smi() { $bounded nvidia-smi "$@" 2>&1; }
    lines() { printf '%s\n' "$2" | sed -n "s/^..*/@sky $1 &/p"; }
    if [ -n "${CUDA_VISIBLE_DEVICES+set}" ]; then tell visible "$CUDA_VISIBLE_DEVICES"; fi
    # drivers before MIG do not know the last field
    if found=$(smi "--query-gpu=$gpu_fields" $table) ||
        found=$(smi "--query-gpu=${gpu_fields%,*}" $table); then
        case $found in [0-9]*) accelerated=cuda ;; *) return 0 ;; esac
        lines gpu "$found"
        lines gpu_tree "$(smi -L)"
        lines gpu_user "$(smi "--query-compute-apps=$gpu_users" $table)"
        sed -n "s|.*@\($gpu_hold.*\)|@sky gpu_hold \1|p" /proc/net/unix 2>/dev/null
    else
        tell gpu_complaint "$(echo ${found:-nvidia-smi took more than 20 s})"
    fi
}

addresses() {
    if command -v ip >/dev/null 2>&1; then
        ip -o addr show up 2>/dev/null |
            sed -n 's/^[0-9]*: *\([^ ]*\) *inet6* \([^ /]*\).*/@sky address \1 \2/p'
    else
        for one in $(hostname -I 2>/dev/null); do tell address - "$one"; done
    fi
}

prepared() {
    "$want" -c "$ask_python$ask_packages" $names 2>/dev/null | sed 's/^\([0-9]\)/@sky python \1/'
}

works() { made "$1" && "$folder/env/$1/bin/python" -c '' 2>/dev/null; }

made() { [ -f "$folder/env/$1/.ready" ]; }

environment() {
    env=$key-$(uname -s)-$(uname -m)
    case $(libc) in musl) env=$env-musl ;; esac
    if [ -n "$builds$jax" ] && [ -n "$accelerated" ]; then env=$env-$accelerated; fi
    # One home may serve several machines, some of them without GPUs, and the interpreter of an
    # environment need not exist on all of them.
    if made "$env" && ! works "$env"; then env=$env-$(uname -n); fi
    tell env "$env"
    if works "$env"; then
        tell ready "$env"
        if [ -f "$folder/env/$env/.sent" ]; then tell sent; fi
        for one in "$folder/env/$env/.own"/*; do
            if [ -f "$one" ]; then tell own "${one##*/}" "$(cat "$one")"; fi
        done
        if [ -n "$base" ]; then
            "$folder/env/$env/bin/python" -c "import sys$ask_packages" $names 2>/dev/null
        fi
        return
    fi
    if [ -n "$base" ]; then
        over_image
        return
    fi
    there=$(interpreters | while IFS= read -r one; do "$one" -c "$ask_python" 2>/dev/null; done)
    printf '%s\n' "$there" | sed -n 's/^./@sky python &/p'
    asker=$(interpreters | while IFS= read -r one; do
        if "$one" -c 'import ssl, sys; sys.exit(sys.version_info < (3, 6))' 2>/dev/null; then
            echo "$one"
            break
        fi
    done)
    if ! printf '%s\n' "$there" | grep -q "^$want "; then sources & fi
    find_uv
    indexes
    wait
}

find_uv() {
    for one in "$folder"/env/*/bin/uv uv "$HOME/.local/bin/uv" "$HOME/.cargo/bin/uv"; do
        # an older one would take any build of PyTorch
        found=$(command -v "$one" 2>/dev/null) &&
            "$found" pip install --help 2>/dev/null </dev/null | grep -q -e --torch-backend &&
            tell uv "$found" && break
    done
}

# The image's own interpreter, not one of the user's home; and what it has.
over_image() {
    want=$(command -v python3 || command -v python) || return 0
    prepared
    asker=$want
    find_uv
    indexes
}

# Whether uv could fetch a Python. Not asked if uv has settings of its own, or a proxy: then it has
# ways that this query does not know.
sources() {
    proxy=${ALL_PROXY-}${all_proxy-}${HTTPS_PROXY-}${https_proxy-}$(pip_says proxy "${PIP_PROXY-}")
    if [ -z "$asker" ] || [ -n "$proxy" ] || own_settings; then return; fi
    "$asker" -c "$ask_sources" "$seconds" \
        ${UV_PYTHON_INSTALL_MIRROR:-https://github.com https://releases.astral.sh} 2>/dev/null
}

# A host whose uv has settings of its own is not asked: they say more than pip's.
indexes() {
    if own_settings; then return; fi
    if [ -n "${UV_FIND_LINKS-}$(pip_says find-links "${PIP_FIND_LINKS-}")" ]; then tell links; fi
    asked="$(default_index) $(more_indexes) $further"
    if no_index; then
        tell no_index
        asked=
    fi
    if [ -n "$asker" ]; then
        certificates
        proxy=$(pip_says proxy "${PIP_PROXY-}")
        pass http_proxy "$proxy"
        pass https_proxy "$proxy"
        SKY_INDEXES=$asked "$asker" -c "$ask_indexes" "$seconds" 2>/dev/null
    elif command -v curl >/dev/null 2>&1; then
        answers=$(
            for one in $asked; do asks_curl "$(bare "$one")" & done
            wait
        )
        printf '%s\n' "$answers" | grep '^@sky'
        tell indexes "$(printf '%s\n' "$answers" | grep -c '^answers')"
    fi
}

asks_curl() {
    curl -s -o /dev/null -m "$seconds" "$1/packaging/" 2>/dev/null
    case $? in 0 | 35 | 60) echo answers ;; *) tell silent "$1" "curl has no answer" ;; esac
}

interpreters() {
    for one in "python$want" python3 python; do command -v "$one"; done
    for one in /usr/bin /usr/local/bin "$HOME/.local/bin" /opt/*/bin "$HOME"/*conda*/bin \
        "$HOME"/*conda*/envs/*/bin "$HOME/.pyenv/versions/$want".*/bin \
        "$HOME"/.local/share/uv/python/*/bin "$folder"/python/*/bin; do
        if [ -x "$one/python$want" ]; then echo "$one/python$want"; fi
    done
}
main </dev/null
"""


def folder_line(requirements: Requirements) -> str:
    """Return a line of sh that sets ``folder``."""
    if requirements.folder is not None:
        head, slash, tail = requirements.folder.partition("/")
        start = '"${HOME-}"' if head == "~" else quote(head) if head else ""
        return f"folder={start}{quote(slash + tail)}"
    return 'folder=${SKYMAGIC_HOME:-"${HOME-}/.skymagic"}'


def probe_script(requirements: Requirements) -> str:
    """Return POSIX sh that prints a host's facts for `parse`.

    Args:
        requirements: requirements of the environment.
    """
    projects = requirements.packages if requirements.prepared else ()
    if requirements.base:
        projects = (*requirements.packages, *requirements.preferences, *TORCH)
    names = {
        "want": requirements.python,
        "key": requirements.key,
        "code": requirements.code,
        "ask_python": PYTHON_PROBE,
        "ask_packages": PACKAGES_PROBE,
        "names": " ".join(dict.fromkeys(filter(None, map(project, projects)))),
        "seconds": str(ANSWER_SECONDS),
        "further": " ".join(
            [*requirements.indexes, *([TORCH_INDEX] if requirements.torch else ())]
        ),
        "builds": " ".join(requirements.torch),
        "ask_indexes": INDEXES_PROBE,
        "ask_sources": SOURCES_PROBE,
        "accelerated": "",
        "base": requirements.base,
        "jax": "yes" if "jax" in set(map(project, requirements.packages)) else "",
        "gpu_fields": gpus.FIELDS,
        "gpu_users": gpus.APPLICATIONS,
        "gpu_hold": gpus.HOLD,
    }
    return "\n".join([TELL, folder_line(requirements), *assignments(names)]) + UV_SETTINGS + _BODY
