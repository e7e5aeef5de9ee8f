tell() { printf '@sky %s\n' "$*"; }
folder='/home/it'"'"'s me/.skymagic'
want=3.11
env=KEY-Linux-x86_64
python='/opt/my python/bin/python3.11'
pip=yes
uv=''
incoming=token
wheel=skymagic-1.0-py3-none-any.whl
code=0123456789abcdef
backend=cpu
torch_index=https://download.pytorch.org/whl/cpu
no_cuda=yes
silent=''
sent_links=''
sent_mark=''

# A step is a command; when it fails, nothing half-made stays.
step() { attempt "$@" || fail; }

attempt() {
    name=$1
    shift
    tell step "$name"
    "$@" </dev/null && return
    status=$?
    command=$*
    return 1
}

fail() {
    tell free "$(df -Pk "$folder" 2>/dev/null | sed -n '2,$s/.* \([0-9][0-9]*\)  *[0-9-]*%.*/\1/p')"
    tell command "$command"
    tell failed "$status"
    leave 1
}

# What an environment has of the notebook's own distributions: a file of each, with its digest.
own() {
    mkdir -p "$made/.own"
    while read -r name digest; do echo "$digest" >"$made/.own/$name"; done <"$drop/own.txt"
}

main() {
    umask 077
    cd /  # a home may hold a random.py
    unset PYTHONHOME PYTHONPATH PYTHONDONTWRITEBYTECODE VIRTUAL_ENV PIP_TARGET PIP_PREFIX UV_SYSTEM_PYTHON
    PIP_NO_INPUT=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_USER=0
    export PIP_NO_INPUT PIP_DISABLE_PIP_VERSION_CHECK PIP_USER
    half= ticker= held= beside= drop=$folder/incoming/$incoming
    trap 'leave 1' HUP INT TERM PIPE
    watch &
    ticker=$!
    if [ -n "$env" ]; then
        lock
        environment
    fi
    if [ -n "$wheel" ]; then code; fi
    tell done
    leave 0
}

# Nobody listens any more when the connection is gone: then this process group ends, with pip and all.
watch() {
    trap '' PIPE
    while sleep 1 </dev/null >/dev/null 2>&1; do
        kill -0 $$ 2>/dev/null && tell tick 2>/dev/null || kill -TERM 0
    done
}

leave() {
    trap '' HUP INT TERM PIPE
    if [ -n "$beside" ]; then wait "$beside"; fi
    if [ -n "$half" ]; then rm -rf "$half"; fi
    if [ -n "$held" ]; then rm -rf "$held"; fi
    rm -rf "$drop"
    if [ -n "$ticker" ]; then kill "$ticker" 2>/dev/null; fi
    exit "$1"
}

# One at a time makes this environment. Where flock is missing or its file system has none, a folder is the lock.
lock() {
    exec 9>>"$folder/env/$env.lock"
    told=
    until try_lock; do
        if [ -z "$told" ]; then tell waiting; fi
        told=yes
        sleep 1
    done
}

try_lock() {
    if command -v flock >/dev/null 2>&1; then
        flock -n 9 2>/dev/null
        case $? in
            0) return 0 ;;
            1) return 1 ;;
        esac
    fi
    if mkdir "$folder/env/$env.held" 2>/dev/null; then
        held=$folder/env/$env.held
        echo "$(uname -n) $$" >"$held/by"
        return 0
    fi
    read -r host pid 2>/dev/null <"$folder/env/$env.held/by" || return 1
    if [ "$host" = "$(uname -n)" ] && ! kill -0 "$pid" 2>/dev/null; then rm -rf "$folder/env/$env.held"; fi
    return 1
}

environment() {
    made=$folder/env/$env
    if [ -f "$made/.ready" ] && "$made/bin/python" -c '' 2>/dev/null; then
        python=$made/bin/python
        return
    fi
    half=$made
    rm -rf "$made"
    if [ ! -w "$HOME" ]; then
        UV_CACHE_DIR=$folder/cache/uv PIP_CACHE_DIR=$folder/cache/pip
        export UV_CACHE_DIR PIP_CACHE_DIR
    fi
    step "writing the list of packages" requirements
    answering
    if [ -n "$sent_links" ]; then sent_alone; fi
    with_uv || with_pip || fail
    wait "$beside"
    python=$made/bin/python
    PATH=$made/bin:$PATH VIRTUAL_ENV=$made
    export PATH VIRTUAL_ENV
    commands
    own
    # what a power cut could take back must not be called ready
    sync -f "$made" 2>/dev/null || sync
    if [ -n "$sent_mark" ]; then : >"$made/.sent"; fi
    step "marking it ready" finish
    half=
}

# What needs no packages can run from here on: skymagic's code is put there while they are downloaded. What fails of it is
# tried again afterwards, and then said.
begun() {
    if [ -n "$beside" ]; then wait "$beside"; fi
    early &
    beside=$!
}

early() {
    python=$made/bin/python
    step() {
        shift
        "$@" </dev/null >/dev/null 2>&1 || exit 1
    }
    if [ -n "$wheel" ]; then code; fi
    tell runs "$python"
}

finish() { : >"$made/.making" && mv "$made/.making" "$made/.ready"; }

code() {
    if [ -d "$folder/code/$code" ]; then return; fi
    fresh=$drop/code
    step "unpacking skymagic" "$python" -m zipfile -e "$drop/$wheel" "$fresh"
    # what nodes run; of the notebook's part, more than half of all, little is imported there, and compiled then
    set -- kernels wire runtime data plan plugins files
    for part; do
        set -- "$@" "$fresh/skymagic/$part"
        shift
    done
    step "compiling skymagic" "$python" -m compileall -q "$@"
    sync -f "$fresh" 2>/dev/null || sync
    # another pool may have been faster; then theirs is as good
    [ -d "$folder/code/$code" ] || step "placing skymagic" mv "$fresh" "$folder/code/$code"
}

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
    if [ -z "$uv" ] && attempt "installing uv" uv_by_pip; then
        uv=$made/bin/uv
        as_pip
        if by_uv; then return; fi
        tell instead
    fi
    guard_pip
    by_steps "installing packages with pip" "$made/bin/python" -m pip install ${cpu:+--extra-index-url "$cpu"} --progress-bar off
}

uv_by_pip() {
    if [ -f "$drop/passed.txt" ]; then
        sed -n '/^-/p; /^uv==/p' "$drop/passed.txt" >"$drop/uv.txt"
        here_only "$made/bin/python" -m pip install $quick -r "$drop/uv.txt" && return
    fi
    "$made/bin/python" -m pip install $quick uv
}

# A program that asks this host's mirror alone.
here_only() {
    env -u UV_DEFAULT_INDEX -u UV_INDEX -u UV_EXTRA_INDEX_URL -u UV_FIND_LINKS -u UV_TORCH_BACKEND -u UV_CONSTRAINT \
        NO_PROXY=127.0.0.1 no_proxy=127.0.0.1 "$@"
}

# What has been chosen for all hosts of this kind comes from their mirrors; of what there is no wheel, each host gets its own.
by_mirror() {
    sed -n '/^file:/p' "$drop/requirements.txt" >"$drop/uploads.txt"
    attempt "installing packages that hosts pass on" here_only \
        "$uv" pip install --no-deps --python "$made/bin/python" -r "$drop/passed.txt" -r "$drop/uploads.txt" || return 1
    [ ! -f "$drop/rest.txt" ]
}

quick="--quiet --retries 1 --timeout 15 --only-binary :all:"

# versions.txt holds what is preferred; compiled, it holds what is taken
by_uv() {
    if [ -f "$drop/passed.txt" ]; then
        if by_mirror; then return; fi
        if [ ! -f "$drop/rest.txt" ]; then tell instead; fi
    fi
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

requirements() {
    {
        printf '%s\n' '--extra-index-url https://user:pa$$'"'"'word@example.org/simple'
        printf '%s\n' numpy==2.0
        printf '%s\n' 'it'"'"'s; echo $HOME'
        printf '%s\n' 'a[b]>=1,<2'
        printf '%s\n' file:///home/it%27s%20me/.skymagic/incoming/token/x-1.0-py3-none-any.whl
        :
    } >"$drop/requirements.txt"
    {
        :
    } >"$drop/builds.txt"
    {
        printf '%s\n' six==1.17.0
        :
    } >"$drop/versions.txt"
    {
        :
    } >"$drop/own.txt"
}
commands() {
    cd "$HOME"
    printf '%s\n' 'echo '"'"'done'"'"' && echo "$HOME"' >"$drop/command"
    step 'running: echo '"'"'done'"'"' && echo "$HOME"' /bin/sh "$drop/command"
    cd /
}
main </dev/null 2>&1
