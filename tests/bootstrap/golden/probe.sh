tell() { printf '@sky %s\n' "$*"; }
folder=${SKYMAGIC_HOME:-"${HOME-}/.skymagic"}
want=3.11
key=5ed5ee4c77cdb6ca-py3.11
code=0123456789abcdef
ask_python='import sys; m = __import__('"'"'importlib.util'"'"').util.find_spec; print('"'"'%d.%d %s %s %s'"'"' % (sys.version_info[0], sys.version_info[1], '"'"'venv'"'"' if m('"'"'venv'"'"') else '"'"'-'"'"', '"'"'pip'"'"' if m('"'"'ensurepip'"'"') else '"'"'-'"'"', sys.executable))'
ask_packages='
import os, re
left = {re.sub('"'"'[-_.]+'"'"', '"'"'-'"'"', name).lower(): name for name in sys.argv[1:]}
for folder in sys.path[1:]:
    for one in os.listdir(folder) if left and os.path.isdir(folder) else ():
        name, _, version = one[:-10].partition('"'"'-'"'"')
        name = re.sub('"'"'[-_.]+'"'"', '"'"'-'"'"', name).lower()
        if one.endswith('"'"'.dist-info'"'"') and name in left:
            print('"'"'@sky package'"'"', left.pop(name), version)
if left:
    import importlib.metadata as m
for name in left.values():
    try:
        print('"'"'@sky package'"'"', name, m.version(name))
    except m.PackageNotFoundError:
        pass
'
names=''
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
    command -v nvidia-smi >/dev/null 2>&1 || return 0
    bounded=
    if command -v timeout >/dev/null 2>&1; then bounded="timeout 20"; fi
    $bounded nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null | sed -n 's/^\(..*\)$/@sky gpu \1/p'
}

addresses() {
    if command -v ip >/dev/null 2>&1; then
        ip -o addr show up 2>/dev/null | sed -n 's/^[0-9]*: *\([^ ]*\) *inet6* \([^ /]*\).*/@sky address \1 \2/p'
    else
        for one in $(hostname -I 2>/dev/null); do tell address - "$one"; done
    fi
}

prepared() {
    "$want" -c "$ask_python$ask_packages" $names 2>/dev/null | sed 's/^\([0-9]\)/@sky python \1/'
}

works() { [ -f "$folder/env/$1/.ready" ] && "$folder/env/$1/bin/python" -c '' 2>/dev/null; }

environment() {
    env=$key-$(uname -s)-$(uname -m)
    case $(libc) in musl) env=$env-musl ;; esac
    # One home may serve several machines, and an environment's interpreter need not be on all of them.
    if [ -f "$folder/env/$env/.ready" ] && ! works "$env"; then env=$env-$(uname -n); fi
    tell env "$env"
    if works "$env"; then
        tell ready "$env"
        return
    fi
    interpreters | while IFS= read -r one; do
        found=$("$one" -c "$ask_python" 2>/dev/null) && tell python "$found"
    done
    for one in uv "$HOME/.local/bin/uv" "$HOME/.cargo/bin/uv"; do
        found=$(command -v "$one" 2>/dev/null) && "$found" --version >/dev/null 2>&1 && tell uv "$found"
    done
}

interpreters() {
    for one in "python$want" python3 python; do command -v "$one"; done
    for one in /usr/bin /usr/local/bin "$HOME/.local/bin" /opt/*/bin "$HOME"/*conda*/bin \
        "$HOME"/*conda*/envs/*/bin "$HOME/.pyenv/versions/$want".*/bin "$HOME"/.local/share/uv/python/*/bin; do
        if [ -x "$one/python$want" ]; then echo "$one/python$want"; fi
    done
}
main </dev/null
