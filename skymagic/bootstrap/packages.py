"""How packages get into an environment, as functions of sh: from another host's, by uv with pip's configuration passed on, or by pip."""

from __future__ import annotations

PACKAGES = r"""
# Another host of this kind has installed them; the interpreter is this host's own.
by_copy() {
    attempt "placing what another host has installed" mv "$drop/$copied/env/$env" "$made" || return 1
    rm -rf "$made"/bin/python* "$made/pyvenv.cfg" "$made/.ready" "$made/.own" "$made/.sent"
    attempt "making an environment with $python" "$python" -m venv --without-pip "$made" && begun
}

# uv is many times faster than pip, but knows fewer ways to reach an index: where it fails, pip tries.
with_uv() {
    [ -n "$uv" ] || return 1
    if [ "$uv" = uploaded ]; then
        attempt "unpacking uv" unpack_uv || return 1
        uv=$drop/uv
    fi
    as_pip
    attempt "making an environment with Python ${python:-$want}" \
        "$uv" venv --no-project --python "${python:-$want}" "$made" && begun && by_uv || return 1
    # for what is installed later, by a cell or by hand; nothing depends on it
    "$uv" pip install --quiet --python "$made/bin/python" pip </dev/null >/dev/null 2>&1 || :
    if [ "$uv" = "$drop/uv" ]; then mv "$uv" "$made/bin/uv" || :; fi
}

with_pip() {
    [ -n "$pip" ] || return 1
    cpu=
    if [ "$backend" = cpu ]; then cpu=$torch_index; fi
    rm -rf "$made"
    attempt "making an environment with $python" "$python" -m venv "$made" && begun || return 1
    if [ -z "$uv" ] && attempt "installing uv" "$made/bin/python" -m pip install $quick uv; then
        uv=$made/bin/uv
        as_pip
        if by_uv; then return; fi
        tell instead
    fi
    guard_pip
    by_steps "installing packages with pip" "$made/bin/python" -m pip install ${cpu:+--extra-index-url "$cpu"} --progress-bar off
}

quick="--quiet --retries 1 --timeout 15 --only-binary :all:"

# versions.txt holds what is preferred; compiled, it holds what is taken
by_uv() {
    if [ -f "$drop/scoped-0.txt" ]; then
        by_steps "installing packages with uv" "$uv" pip install --python "$made/bin/python"
        return
    fi
    attempt "choosing versions with uv" "$uv" pip compile --quiet --no-header --no-annotate --python "$made/bin/python" \
        "$drop/requirements.txt" -c "$drop/builds.txt" -o "$drop/versions.txt" || return 1
    if takes_cuda "$drop/versions.txt"; then refuse_cuda; fi
    attempt "installing packages with uv" "$uv" pip install --python "$made/bin/python" \
        -r "$drop/requirements.txt" -c "$drop/builds.txt" -c "$drop/versions.txt"
}

# WORDS INSTALLER…: packages that have an index of their own come first, without what they need: nothing else is to come
# from there, and they do not come from elsewhere.
by_steps() {
    words=$1
    shift
    for list in "$drop"/scoped-*.txt; do
        if [ -f "$list" ]; then
            attempt "installing packages from their own index" \
                env -u UV_DEFAULT_INDEX -u UV_INDEX -u UV_EXTRA_INDEX_URL "$@" --no-deps -r "$list" || return 1
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
    echo "torch is needed there, the host has no GPU, and its package indexes have only builds for CUDA"
    command= status=1
    fail
}

# Before pip, which would take any build: uv may have failed because PyTorch's own index did.
guard_pip() {
    if [ -z "$uv" ] || [ -z "$no_cuda" ]; then return; fi
    if (
        unset UV_TORCH_BACKEND
        "$uv" pip compile --quiet --no-header --no-annotate --python "$made/bin/python" "$drop/requirements.txt" \
            -c "$drop/builds.txt" -o "$drop/any.txt"
    ) >/dev/null 2>&1 </dev/null && takes_cuda "$drop/any.txt"; then refuse_cuda; fi
}

# uv reads no configuration of pip; what this host says of indexes and certificates is passed on, without those
# that do not answer: uv and pip would wait for each of them with every package.
as_pip() {
    UV_PYTHON_INSTALL_DIR=$folder/python UV_NO_PROGRESS=1
    export UV_PYTHON_INSTALL_DIR UV_NO_PROGRESS
    # few cores take longer for all modules than an import for those that it needs
    cores=$(getconf _NPROCESSORS_ONLN 2>/dev/null) || cores=1
    if [ "$cores" -gt 4 ]; then UV_COMPILE_BYTECODE=1; export UV_COMPILE_BYTECODE; fi
    certificates
    if [ -n "$backend" ]; then UV_TORCH_BACKEND=$backend; export UV_TORCH_BACKEND; fi
    : "${UV_INDEX_STRATEGY=unsafe-best-match}"
    export UV_INDEX_STRATEGY
    if own_settings; then return 0; fi
    pass UV_DEFAULT_INDEX "$(pip_says index-url "${PIP_INDEX_URL-}")"
    pass UV_INDEX "$(pip_says extra-index-url "${PIP_EXTRA_INDEX_URL-}")"
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
    unset UV_DEFAULT_INDEX UV_INDEX UV_INDEX_URL UV_EXTRA_INDEX_URL PIP_INDEX_URL PIP_EXTRA_INDEX_URL
    PIP_CONFIG_FILE=/dev/null PIP_NO_INDEX=1 PIP_FIND_LINKS=$sent_links
    UV_NO_CONFIG=1 UV_NO_INDEX=1 UV_FIND_LINKS=$sent_links UV_OFFLINE=1
    export PIP_CONFIG_FILE PIP_NO_INDEX PIP_FIND_LINKS UV_NO_CONFIG UV_NO_INDEX UV_FIND_LINKS UV_OFFLINE
    backend= silent=
}

bare() { printf '%s\n' "$1" | sed 's|://[^/]*@|://|; s|/*$||'; }

unpack_uv() {
    gzip -dc "$drop/uv.gz" >"$drop/uv" && chmod 700 "$drop/uv"
}
"""
