"""What a host's pip is configured with, as functions of sh: its indexes, links, certificates and proxy."""

from __future__ import annotations

PIP_SETTINGS = r"""
# KEY OF-ENVIRONMENT: pip's setting, on one line; the environment's wins, and later files.
pip_says() {
    if [ -n "$2" ]; then
        echo $2
        return
    fi
    if [ "${PIP_CONFIG_FILE-}" = /dev/null ]; then return; fi  # as pip has it
    for one in /etc/xdg/pip/pip.conf /etc/pip.conf "$HOME/.pip/pip.conf" "$HOME/.config/pip/pip.conf" "${PIP_CONFIG_FILE-}"; do
        if [ -f "$one" ]; then cat "$one"; echo; fi
    done | awk -v key="$1" '
        /^[ \t]*[#;]/ { next }
        /^\[/ { on = /^\[(global|install)\]/; hit = 0; next }
        on && /^[A-Za-z]/ {
            name = $0; sub(/[ \t]*[=:].*/, "", name); gsub(/_/, "-", name); hit = tolower(name) == key
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

default_index() {
    if [ -n "${UV_DEFAULT_INDEX-}" ]; then echo "$UV_DEFAULT_INDEX"; return; fi
    said=$(pip_says index-url "${PIP_INDEX_URL-}")
    echo "${said:-https://pypi.org/simple}"
}

more_indexes() { if [ -n "${UV_INDEX-}" ]; then echo $UV_INDEX; else pip_says extra-index-url "${PIP_EXTRA_INDEX_URL-}"; fi; }

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
