"""Shell text shared by the scripts for hosts: quoting, pip's settings, and installing packages."""

from __future__ import annotations

import re
from collections.abc import Mapping
from shlex import quote

MARK = "@sky "
"""Prefix of each line that our scripts print for us. All other lines are output of other programs.
"""

TELL = f"tell() {{ printf '{MARK}%s\\n' \"$*\"; }}"
"""Shell function that prints such a line."""

_SAFE = re.compile(r"[A-Za-z0-9_./:=@%+-]+")
_PLAIN = re.compile(r"[A-Za-z0-9_./:=@%+ ,~-]")


def assignments(names: Mapping[str, str]) -> list[str]:
    """Return lines of sh that assign values to variables."""
    return [f"{name}={quote(value)}" for name, value in names.items()]


def any_shell(script: str) -> str:
    """Return a command line that sh, bash, zsh, fish, csh and tcsh all understand in the same way.

    It runs a line of sh, which replaces the shell.

    Args:
        script: text without single quotes, newlines and exclamation marks. Pass other text through
            `any_shell_word`.
    """
    assert not set(script) & set("'!\n"), script
    return f"exec /bin/sh -c '{script}'"


def any_shell_word(text: str) -> str:
    """Return `text` as one word within `any_shell`.

    Characters that any of the shells might interpret are written in octal. Fish does interpret
    backslashes in single quotes, but only before a quote or another backslash. Newlines at the end
    are lost.
    """
    if _SAFE.fullmatch(text):
        return text
    octal = (
        char if _PLAIN.match(char) else "".join(f"\\0{byte:03o}" for byte in char.encode())
        for char in text
    )
    return f'"$(printf %b "{"".join(octal)}")"'


# -- pip's settings --------------------------------------------------------------------------------


PIP_SETTINGS = r"""
# KEY OF-ENVIRONMENT: pip's setting, on one line; the environment's wins, and later files.
pip_says() {
    if [ -n "$2" ]; then
        echo $2
        return
    fi
    if [ "${PIP_CONFIG_FILE-}" = /dev/null ]; then return; fi  # as pip has it
    for one in /etc/xdg/pip/pip.conf /etc/pip.conf \
        "$HOME/.pip/pip.conf" "$HOME/.config/pip/pip.conf" "${PIP_CONFIG_FILE-}"; do
        if [ -f "$one" ]; then cat "$one"; echo; fi
    done | awk -v key="$1" '
        /^[ \t]*[#;]/ { next }
        /^\[/ { on = /^\[(global|install)\]/; hit = 0; next }
        on && /^[A-Za-z]/ {
            name = $0
            sub(/[ \t]*[=:].*/, "", name)
            gsub(/_/, "-", name)
            hit = tolower(name) == key
            if (hit) { said = $0; sub(/^[^=:]*[=:][ \t]*/, "", said) }
            next
        }
        hit { said = said " " $0 }
        END { $0 = said; $1 = $1; print }'
}

certificates() {
    for one in "${SSL_CERT_FILE-}" "$(pip_says cert "${PIP_CERT-}")" \
        /etc/ssl/certs/ca-certificates.crt /etc/pki/tls/certs/ca-bundle.crt; do
        if [ -f "$one" ]; then
            SSL_CERT_FILE=$one
            export SSL_CERT_FILE
            break
        fi
    done
}

# uv has settings of its own on this host, and reads them itself
own_settings() { [ -f "$HOME/.config/uv/uv.toml" ] || [ -f /etc/uv/uv.toml ]; }

no_index() { [ -n "${UV_NO_INDEX-}$(pip_says no-index "${PIP_NO_INDEX-}")" ]; }

bare() { printf '%s\n' "$1" | sed 's|://[^/]*@|://|; s|/*$||'; }

default_index() {
    if [ -n "${UV_DEFAULT_INDEX-}" ]; then echo "$UV_DEFAULT_INDEX"; return; fi
    said=$(pip_says index-url "${PIP_INDEX_URL-}")
    echo "${said:-https://pypi.org/simple}"
}

more_indexes() {
    if [ -n "${UV_INDEX-}" ]; then
        echo $UV_INDEX
    else
        pip_says extra-index-url "${PIP_EXTRA_INDEX_URL-}"
    fi
}

# INDEX: anybody can publish there.
is_public() {
    case "$(bare "$1")/" in
        *://pypi.org/* | *://pypi.python.org/* | *://test.pypi.org/*) ;;
        *) return 1 ;;
    esac
}

# INDEX: it has PyTorch's builds, and some packages of others in few versions.
of_pytorch() { case "$(bare "$1")/" in *://download.pytorch.org/*) ;; *) return 1 ;; esac; }

# Those beside the default one, which the list of packages or this host names.
further_indexes() {
    sed -n 's/^--extra-index-url //p' "${drop:-$folder}/requirements.txt" 2>/dev/null
    more_indexes
    echo ${UV_EXTRA_INDEX_URL-}
}

# Whether packages come from one index, but for PyTorch's.
one_source() {
    for one in $(further_indexes); do of_pytorch "$one" || return 1; done
}

# uv takes a package from the first index that has it. So private indexes come first: nobody can
# publish a package of the same name in an index that is asked later. uv asks the default index
# last, so pip's main index cannot stay the default if it is a private one.
pass_indexes() {
    if no_index || [ -n "${UV_DEFAULT_INDEX-}${UV_INDEX-}" ] || one_source; then
        pass UV_DEFAULT_INDEX "$(pip_says index-url "${PIP_INDEX_URL-}")"
        pass UV_INDEX "$(pip_says extra-index-url "${PIP_EXTRA_INDEX_URL-}")"
        return
    fi
    private= public= pytorch=
    for one in $(further_indexes) "$(default_index)"; do
        if of_pytorch "$one"; then pytorch="$pytorch $one"
        elif is_public "$one"; then public="$public $one"
        else private="$private $one"; fi
    done
    before= last=
    for one in $private $public $pytorch; do
        before="$before${last:+ $last}"
        last=$one
    done
    pass UV_DEFAULT_INDEX "$last"
    pass UV_INDEX "${before# }"
}

# Compare versions among indexes only if the further ones are PyTorch's: it also has a few old
# versions of other packages, and as the first index it would decide about those.
strategy() {
    if ! own_settings && [ -n "$(further_indexes)" ] && one_source; then
        pass UV_INDEX_STRATEGY unsafe-best-match
    fi
    if [ -z "${UV_INDEX_STRATEGY-}" ]; then unset UV_INDEX_STRATEGY; fi
}

pass() {
    eval "already=\${$1-}"
    if [ -n "$2" ] && [ -z "$already" ]; then export "$1=$2"; fi
}

# With commas between; what is not there, pip passes over, and uv does not.
links() {
    among=
    for one; do
        case $one in *://*) ;; *) [ -e "$one" ] || continue ;; esac
        among=$among,$one
    done
    echo "${among#,}"
}
"""


# -- packages --------------------------------------------------------------------------------------


PACKAGES = r"""
# Another host of this kind has installed them; the interpreter is this host's own.
by_copy() {
    attempt "placing what another host has installed" \
        mv "$drop/$copied/env/$env" "$made" || return 1
    for one in "$made"/bin/python*; do
        if [ -L "$one" ]; then rm -f "$one"; fi  # a package's program may have such a name
    done
    rm -rf "$made/pyvenv.cfg" "$made/.ready" "$made/.own" "$made/.sent"
    attempt "making an environment with $python" "$python" -m venv --without-pip "$made" && begun
}

# uv is many times faster than pip, but knows fewer ways to reach an index. If it fails, pip tries.
with_uv() {
    [ -n "$uv" ] || return 1
    if [ "$uv" = uploaded ]; then
        attempt "unpacking uv" unpack_uv || return 1
        uv=$drop/uv
    fi
    as_pip
    attempt "making an environment with Python ${python:-$want}" \
        "$uv" venv --no-project --python "${python:-$want}" "$made" && begun && by_uv || return 1
    later_pip
    if [ "$uv" = "$drop/uv" ]; then mv "$uv" "$made/bin/uv" || :; fi
}

with_pip() {
    [ -n "$pip" ] || return 1
    if [ -n "$uv" ] && unsolvable; then return 1; fi
    cpu=
    if [ "$backend" = cpu ]; then cpu=$torch_index; fi
    rm -rf "$made"
    attempt "making an environment with $python" \
        "$python" -m venv --without-pip "$made" && begun || return 1
    if [ -z "$uv" ]; then
        bundled=$(bundled_pip) || bundled=
        if [ -z "$bundled" ]; then ensure_pip || return 1; fi
        if attempt "installing uv" \
            env PYTHONPATH="$bundled" "$made/bin/python" -m pip install $quick uv; then
            uv=$made/bin/uv
            as_pip
            if by_uv; then later_pip; return; fi
            if unsolvable; then return 1; fi
            tell instead
        fi
    fi
    guard_pip
    ensure_pip || return 1
    by_steps "installing packages with pip" \
        "$made/bin/python" -m pip install ${cpu:+--extra-index-url "$cpu"} --progress-bar off
}

# Whether uv has found no versions that fit. Then pip must not try: it takes the best version of all
# indexes, and so would look past the index that has the package.
unsolvable() {
    case ${UV_INDEX_STRATEGY-} in unsafe-*) return 1 ;; esac
    [ "$status" = 1 ] && ! one_source
}

# Python contains pip as a wheel, which runs as it is. To install it takes seconds, most of them for
# its bytecode.
bundled_pip() {
    "$python" -c '
import ensurepip, glob, os, sysconfig
bundled = os.path.join(os.path.dirname(ensurepip.__file__), "_bundled")
for folder in (sysconfig.get_config_var("WHEEL_PKG_DIR"), bundled):
    for wheel in glob.glob(os.path.join(folder or "/nowhere", "pip-*.whl")):
        print(wheel)
        raise SystemExit'
}

ensure_pip() {
    if [ -f "$made/bin/pip" ]; then return; fi
    attempt "installing pip" "$made/bin/python" -m ensurepip --default-pip
}

# For what is installed later, by a cell or by hand; nothing depends on it.
later_pip() {
    "$uv" pip install --quiet --python "$made/bin/python" "${bundled:-pip}" \
        </dev/null >/dev/null 2>&1 || :
}

quick="--quiet --retries 1 --timeout 15 --only-binary :all:"

# versions.txt holds what is preferred; compiled, it holds what is taken
by_uv() {
    if [ -f "$drop/scoped-0.txt" ]; then
        by_steps "installing packages with uv" "$uv" pip install --python "$made/bin/python"
        return
    fi
    attempt "choosing versions with uv" \
        "$uv" pip compile --quiet --no-header --no-annotate --python "$made/bin/python" \
        "$drop/requirements.txt" -c "$drop/builds.txt" -o "$drop/versions.txt" || return 1
    if takes_cuda "$drop/versions.txt"; then refuse_cuda; fi
    attempt "installing packages with uv" "$uv" pip install --python "$made/bin/python" \
        -r "$drop/requirements.txt" -c "$drop/builds.txt" -c "$drop/versions.txt"
}

# WORDS INSTALLER…: packages that have an index of their own come first, without their dependencies:
# nothing else is to come from there, and they do not come from elsewhere.
by_steps() {
    words=$1
    shift
    for list in "$drop"/scoped-*.txt; do
        if [ -f "$list" ]; then
            attempt "installing packages from their own index" \
                env -u UV_DEFAULT_INDEX -u UV_INDEX -u UV_EXTRA_INDEX_URL \
                "$@" --no-deps -r "$list" || return 1
        fi
    done
    set -- "$@" -r "$drop/requirements.txt" -c "$drop/builds.txt"
    attempt "$words" "$@" -c "$drop/versions.txt" && return
    tell instead
    attempt "$words, without the notebook's versions of what they need" "$@"
}

# Whether a host without GPUs would get PyTorch for CUDA, which nobody has agreed to.
takes_cuda() {
    [ -n "$no_cuda" ] && grep -q '^torch==' "$1" && grep -q -e '^nvidia-' -e '^cuda-' "$1"
}

refuse_cuda() {
    tell step "looking for a build of torch without CUDA"
    echo "torch is needed there, the host has no GPU," \
        "and its package indexes have only builds for CUDA"
    command= status=1
    fail
}

# Before pip, which would take any build: uv may have failed because PyTorch's own index did.
guard_pip() {
    if [ -z "$uv" ] || [ -z "$no_cuda" ]; then return; fi
    if (
        unset UV_TORCH_BACKEND
        "$uv" pip compile --quiet --no-header --no-annotate --python "$made/bin/python" \
            "$drop/requirements.txt" -c "$drop/builds.txt" -o "$drop/any.txt"
    ) >/dev/null 2>&1 </dev/null && takes_cuda "$drop/any.txt"; then refuse_cuda; fi
}

# uv reads no configuration of pip: pass on this host's indexes and certificates, without indexes
# that do not answer, because uv and pip would wait for each of them with every package.
as_pip() {
    UV_PYTHON_INSTALL_DIR=$folder/python UV_NO_PROGRESS=1
    export UV_PYTHON_INSTALL_DIR UV_NO_PROGRESS
    # few cores take longer for all modules than an import for those that it needs
    cores=$(getconf _NPROCESSORS_ONLN 2>/dev/null) || cores=1
    if [ "$cores" -gt 4 ]; then UV_COMPILE_BYTECODE=1; export UV_COMPILE_BYTECODE; fi
    certificates
    if [ -n "$backend" ]; then UV_TORCH_BACKEND=$backend; export UV_TORCH_BACKEND; fi
    strategy
    if own_settings; then return 0; fi
    pass_indexes
    pass UV_FIND_LINKS "$(links $(pip_says find-links "${PIP_FIND_LINKS-}"))"
    pass UV_NO_INDEX "$(pip_says no-index "${PIP_NO_INDEX-}")"
    pass UV_INSECURE_HOST "$(pip_says trusted-host "${PIP_TRUSTED_HOST-}")"
    pass ALL_PROXY "$(pip_says proxy "${PIP_PROXY-}")"
}

# The indexes that answer, for pip and uv: the first one takes the place of a default that does not.
answering() {
    if [ -z "$silent" ] || no_index || own_settings; then return 0; fi
    first= more=
    for one in $(default_index) $(more_indexes); do
        case " $silent " in *" $(bare "$one") "*) continue ;; esac
        if [ -z "$first" ]; then first=$one; else more="$more $one"; fi
    done
    unset UV_DEFAULT_INDEX UV_INDEX
    if [ -z "$first" ]; then
        PIP_NO_INDEX=1
        export PIP_NO_INDEX
    fi
    PIP_INDEX_URL=${first:-file:///nowhere} PIP_EXTRA_INDEX_URL=${more:-$first}
    export PIP_INDEX_URL PIP_EXTRA_INDEX_URL
}

# The notebook has sent wheels: they are all that there is, and no index is asked.
sent_alone() {
    unset UV_DEFAULT_INDEX UV_INDEX UV_INDEX_URL UV_EXTRA_INDEX_URL
    unset PIP_INDEX_URL PIP_EXTRA_INDEX_URL
    PIP_CONFIG_FILE=/dev/null PIP_NO_INDEX=1 PIP_FIND_LINKS=$sent_links
    UV_NO_CONFIG=1 UV_NO_INDEX=1 UV_FIND_LINKS=$sent_links UV_OFFLINE=1
    export PIP_CONFIG_FILE PIP_NO_INDEX PIP_FIND_LINKS
    export UV_NO_CONFIG UV_NO_INDEX UV_FIND_LINKS UV_OFFLINE
    backend= silent=
}

unpack_uv() {
    gzip -dc "$drop/uv.gz" >"$drop/uv" && chmod 700 "$drop/uv"
}
"""
