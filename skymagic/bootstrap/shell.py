"""Shell text shared by the scripts for hosts: quoting, and uv's settings."""

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


# -- uv's settings ---------------------------------------------------------------------------------


UV_SETTINGS = r"""
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

no_index() { [ -n "$(pip_says no-index "${PIP_NO_INDEX-}")" ]; }

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

# uv takes a package from the first index that has it. So private indexes come first: nobody can
# publish a package of the same name in an index that is asked later. uv asks the default index
# last, so pip's main index cannot stay the default if it is a private one. PyTorch's index serves
# only PyTorch's packages, which is what --torch-backend is for, unless the request names it.
pass_indexes() {
    private= public= pytorch=
    for one in $named $(more_indexes) ${UV_EXTRA_INDEX_URL-} "$(default_index)"; do
        case " $silent " in *" $(bare "$one") "*) continue ;; esac
        if of_pytorch "$one"; then
            case " $named " in *" $one "*) pytorch="$pytorch $one" ;; esac
        elif is_public "$one"; then public="$public $one"
        else private="$private $one"; fi
    done
    before= last=
    for one in $private $pytorch $public; do
        before="$before${last:+ $last}"
        last=$one
    done
    unset UV_EXTRA_INDEX_URL
    pass UV_DEFAULT_INDEX "$last"
    pass UV_INDEX "${before# }"
    if [ -z "$last" ]; then only=--no-index; fi
    # a nightly index also has old versions of other packages
    if [ -n "$pytorch" ] && [ -z "$private" ]; then pass UV_INDEX_STRATEGY unsafe-best-match; fi
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

# uv reads no configuration of pip: pass on this machine's indexes and certificates, without indexes
# that do not answer, because uv would wait for each of them with every package.
uv_settings() {
    UV_PYTHON_INSTALL_DIR=$folder/python UV_NO_PROGRESS=1
    export UV_PYTHON_INSTALL_DIR UV_NO_PROGRESS
    # few cores take longer for all modules than an import for those that it needs
    cores=$(getconf _NPROCESSORS_ONLN 2>/dev/null) || cores=1
    if [ "$cores" -gt 4 ]; then UV_COMPILE_BYTECODE=1; export UV_COMPILE_BYTECODE; fi
    only=  # no variable of uv says it
    certificates
    if [ -n "$sent_links" ]; then
        # wheels were sent: they are all that there is, and no index is asked
        unset UV_DEFAULT_INDEX UV_INDEX UV_INDEX_URL UV_EXTRA_INDEX_URL
        UV_NO_CONFIG=1 UV_FIND_LINKS=$sent_links UV_OFFLINE=1 only=--no-index
        export UV_NO_CONFIG UV_FIND_LINKS UV_OFFLINE
        return
    fi
    if [ -n "$backend" ]; then UV_TORCH_BACKEND=$backend; export UV_TORCH_BACKEND; fi
    if [ -z "${UV_INDEX_STRATEGY-}" ]; then unset UV_INDEX_STRATEGY; fi
    # in variables: all users can see a command line, and URLs may hold passwords
    named=$(cat "$drop/indexes.txt" 2>/dev/null)
    if own_settings || [ -n "${UV_DEFAULT_INDEX-}${UV_INDEX-}" ]; then
        if [ -n "$named" ]; then UV_INDEX="$(echo $named ${UV_INDEX-})"; export UV_INDEX; fi
    elif no_index; then
        only=--no-index
    else
        pass_indexes
    fi
    if own_settings; then return 0; fi
    pass UV_FIND_LINKS "$(links $(pip_says find-links "${PIP_FIND_LINKS-}"))"
    pass UV_INSECURE_HOST "$(pip_says trusted-host "${PIP_TRUSTED_HOST-}")"
    pass ALL_PROXY "$(pip_says proxy "${PIP_PROXY-}")"
}
"""
"""Shell functions that make uv use what this user's pip is configured to use (`uv_settings`).

They read the variables ``folder``, ``drop`` (a folder with the list ``indexes.txt``), ``backend``,
``silent`` and ``sent_links``, and set ``only``, which is an option of uv's commands, or empty.
"""
