tell() { printf '@sky %s\n' "$*"; }
folder=${SKYMAGIC_HOME:-"${HOME-}/.skymagic"}
want=3.11
key=a16a0a14701dcf43-py3.11
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
seconds=8
further='https://user:pa$$'"'"'word@example.org/simple'
builds=''
sizes=''
ask_indexes='
import base64, json, os, re, ssl, sys, threading, time, zipfile, zlib
from urllib import error, parse, request

seconds, minor, machine = float(sys.argv[1]), sys.argv[2], sys.argv[3]
tag = '"'"'cp'"'"' + minor.replace('"'"'.'"'"', '"'"''"'"')
answered = set()

def bare(url):
    parts = parse.urlsplit(url)
    return parse.urlunsplit(parts._replace(netloc=parts.netloc.rpartition('"'"'@'"'"')[2])).rstrip('"'"'/'"'"')

def authorization(url, index):
    """What an index'"'"'s own URL says of who asks, where this one is of the same host."""
    known = parse.urlsplit(index)
    if not known.username or known.hostname != parse.urlsplit(url).hostname:
        return '"'"''"'"'
    words = parse.unquote(known.username) + '"'"':'"'"' + parse.unquote(known.password or '"'"''"'"')
    return '"'"'Basic '"'"' + base64.b64encode(words.encode()).decode()

def get(url, base=None):
    if url.startswith('"'"'file:'"'"'):
        path = request.url2pathname(parse.urlsplit(url).path)
        if os.path.isdir(path):
            path = os.path.join(path, '"'"'index.html'"'"')
        with open(path, '"'"'rb'"'"') as file:
            answered.add(base)
            return file.read()
    asked = request.Request(bare(url) + ('"'"'/'"'"' if url.endswith('"'"'/'"'"') else '"'"''"'"'))
    asked.add_header('"'"'Accept'"'"', '"'"'application/vnd.pypi.simple.v1+json, text/html;q=0.5'"'"')
    asked.add_header('"'"'User-Agent'"'"', '"'"'pip (skymagic)'"'"')
    asked.add_header('"'"'Accept-Encoding'"'"', '"'"'gzip'"'"')
    if authorization(url, base or url):
        asked.add_header('"'"'Authorization'"'"', authorization(url, base or url))
    with request.urlopen(asked, timeout=seconds) as reply:
        answered.add(base)  # also when the rest takes too long to be read
        data = reply.read()
        return zlib.decompress(data, 31) if reply.headers.get('"'"'Content-Encoding'"'"') == '"'"'gzip'"'"' else data

def entries(page, base):
    if page.lstrip()[:1] == b'"'"'{'"'"':
        for one in json.loads(page.decode())['"'"'files'"'"']:
            told = bool(one.get('"'"'core-metadata'"'"') or one.get('"'"'data-dist-info-metadata'"'"'))
            yield one['"'"'filename'"'"'], parse.urljoin(base, one['"'"'url'"'"']), one.get('"'"'size'"'"'), told, one.get('"'"'hashes'"'"', {}).get('"'"'sha256'"'"', '"'"''"'"')
        return
    for link, more in re.findall(r'"'"'<a\s[^>]*?href=["\'"'"']([^"\'"'"'#]+)([^>]*)>'"'"', page.decode('"'"'utf-8'"'"', '"'"'replace'"'"'), re.I):
        url = parse.urljoin(base, link)
        digest = re.search('"'"'sha256=([0-9a-f]{64})'"'"', more)
        yield parse.unquote(url.rpartition('"'"'/'"'"')[2]), url, None, '"'"'-metadata'"'"' in more, digest.group(1) if digest else '"'"''"'"'

def fits(name):
    python, abi, platform = (name[:-4].rsplit('"'"'-'"'"', 3) + ['"'"''"'"', '"'"''"'"', '"'"''"'"'])[1:4]
    if not ({'"'"'py3'"'"', tag} & set(python.split('"'"'.'"'"')) or (abi == '"'"'abi3'"'"' and python.startswith('"'"'cp3'"'"'))):
        return False
    here = '"'"'macosx'"'"' if sys.platform == '"'"'darwin'"'"' else '"'"'linux'"'"'
    return platform == '"'"'any'"'"' or (here in platform and ('"'"'universal'"'"' in platform or machine in platform))

def normal(name):
    return re.sub(r'"'"'[-_.]+'"'"', '"'"'-'"'"', name).lower()

def page_of(index, name):
    return index.rstrip('"'"'/'"'"') + '"'"'/'"'"' + normal(name) + '"'"'/'"'"'

def version_of(file, name):
    """The version of a wheel that is of this project and may fit; else '"'"''"'"'."""
    project, version = (file.split('"'"'-'"'"') + ['"'"''"'"'])[:2]
    return version if file.endswith('"'"'.whl'"'"') and fits(file) and normal(project) == normal(name) else '"'"''"'"'

wanted = [text.partition('"'"'=='"'"')[::2] for text in sys.argv[4:]]
indexes = list(dict.fromkeys(os.environ.get('"'"'SKY_INDEXES'"'"', '"'"''"'"').split()))
links = os.environ.get('"'"'SKY_LINKS'"'"', '"'"''"'"').replace('"'"','"'"', '"'"' '"'"').split()
begun = time.time()
silent, offers = {}, set()

def cuda(name, url, base, told):
    """Whether a build without a label is one for CUDA, as what it needs says; '"'"'-'"'"' where nobody tells."""
    try:
        if url.startswith('"'"'file:'"'"'):
            with zipfile.ZipFile(request.url2pathname(parse.urlsplit(url).path)) as wheel:
                text = wheel.read(next(n for n in wheel.namelist() if n.endswith('"'"'.dist-info/METADATA'"'"'))).decode()
        elif told:
            text = get(url + '"'"'.metadata'"'"', base).decode()
        else:
            return '"'"'-'"'"'
    except Exception:
        return '"'"'-'"'"'
    return '"'"'cuda'"'"' if re.search(r'"'"'^Requires-Dist: (nvidia|cuda)-'"'"', text, re.M) else '"'"'cpu'"'"'

def offered(name, version, page, base, source):
    for file, url, size, told, _ in entries(page, base):
        has = version_of(file, name)
        if not has or (version and has.partition('"'"'+'"'"')[0] != version):
            continue
        if size is None and url.startswith('"'"'file:'"'"'):
            size = os.path.getsize(request.url2pathname(parse.urlsplit(url).path))
        build = '"'"'-'"'"' if '"'"'+'"'"' in has or not normal(name).startswith('"'"'torch'"'"') or not version else cuda(file, url, source, told)
        offers.add((normal(name), has, str(size or '"'"'-'"'"'), build, bare(source)))

def ask(index, name, version):
    url = page_of(index, name)
    try:
        page = get(url, index)
    except Exception as problem:
        if index in answered or isinstance(problem, error.HTTPError) or isinstance(getattr(problem, '"'"'reason'"'"', problem), (ssl.SSLError, FileNotFoundError)):
            answered.add(index)
        elif '"'"'timed out'"'"' not in str(problem):
            silent[index] = str(getattr(problem, '"'"'reason'"'"', problem))
        return
    offered(name, version, page, url, index)

def look(place, name, version):
    if '"'"'://'"'"' in place:
        try:
            offered(name, version, get(place), place, place)
        except Exception:
            pass
    elif os.path.isdir(place):
        page = json.dumps({'"'"'files'"'"': [{'"'"'filename'"'"': n, '"'"'url'"'"': n} for n in os.listdir(place)]}).encode()
        offered(name, version, page, '"'"'file://'"'"' + request.pathname2url(place) + '"'"'/'"'"', place)

def work(calls):
    while True:
        try:
            call, *args = calls.pop(0)
        except IndexError:
            return  # another was faster
        call(*args)

queues = [[(ask, index, *one) for one in wanted or [('"'"'packaging'"'"', '"'"''"'"')]] for index in indexes]
queues += [[(look, place, *one) for place in links for one in wanted]]
threads = []
for queue in queues:  # one for each index: none waits for another
    for _ in range(min(6, len(queue))):
        threads.append(threading.Thread(target=work, args=(queue,), daemon=True))
        threads[-1].start()
for each in threads:
    each.join(max(0, begun + seconds - time.time()))
print('"'"'@sky indexes'"'"', len(answered & set(indexes)))
if links:
    print('"'"'@sky links'"'"')
for index in indexes:
    if index not in answered:
        print('"'"'@sky silent'"'"', bare(index), silent.get(index, '"'"'no answer in %.0f s'"'"' % seconds))
for one in sorted(list(offers)):
    print('"'"'@sky offer'"'"', *one)
sys.stdout.flush()
os._exit(0)  # those who still wait are not waited for
'
ask_sources='
import os, socket, sys, threading, time
from urllib.parse import urlsplit
end = time.time() + float(sys.argv[1])
places = [urlsplit(url) for url in sys.argv[2:]]
def ask(place):
    if place.scheme in ('"'"'http'"'"', '"'"'https'"'"'):
        port = place.port or {'"'"'http'"'"': 80}.get(place.scheme, 443)
        socket.create_connection((place.hostname, port), end - time.time()).close()
    os._exit(0)
asked = [threading.Thread(target=ask, args=(place,), daemon=True) for place in places]
for each in asked:
    each.start()
for each in asked:
    each.join(max(0, end - time.time()))
print('"'"'@sky unreached'"'"', '"'"', '"'"'.join(place.hostname for place in places))
sys.stdout.flush()
os._exit(0)
'
accelerated=''
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
    if [ -e /dev/kfd ] || command -v rocm_agent_enumerator >/dev/null 2>&1; then accelerated=rocm; tell rocm; fi
    if [ -r /sys/module/nvidia/version ]; then accelerated=cuda; tell driver "$(cat /sys/module/nvidia/version)"; fi
    command -v nvidia-smi >/dev/null 2>&1 || return 0
    bounded=
    if command -v timeout >/dev/null 2>&1; then bounded="timeout 20"; fi
    found=$($bounded nvidia-smi --query-gpu=name --format=csv,noheader 2>/dev/null | sed -n 's/^\(..*\)$/@sky gpu \1/p')
    if [ -n "$found" ]; then accelerated=cuda; echo "$found"; fi
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
    if [ -n "$builds" ] && [ -n "$accelerated" ]; then env=$env-$accelerated; fi
    # One home may serve several machines, with GPUs and without; and an environment's interpreter need not be on all of them.
    if [ -f "$folder/env/$env/.ready" ] && ! works "$env"; then env=$env-$(uname -n); fi
    tell env "$env"
    if works "$env"; then
        tell ready "$env"
        if [ -f "$folder/env/$env/.sent" ]; then tell sent; fi
        for one in "$folder/env/$env/.own"/*; do
            if [ -f "$one" ]; then tell own "${one##*/}" "$(cat "$one")"; fi
        done
        return
    fi
    there=$(interpreters | while IFS= read -r one; do "$one" -c "$ask_python" 2>/dev/null; done)
    printf '%s\n' "$there" | sed -n 's/^./@sky python &/p'
    asker=$(interpreters | while IFS= read -r one; do
        if "$one" -c 'import ssl, sys; sys.exit(sys.version_info < (3, 6))' 2>/dev/null; then echo "$one"; break; fi
    done)
    if ! printf '%s\n' "$there" | grep -q "^$want "; then sources & fi
    for one in uv "$HOME/.local/bin/uv" "$HOME/.cargo/bin/uv"; do
        # an older one would take any build of PyTorch
        found=$(command -v "$one" 2>/dev/null) && "$found" pip install --help 2>/dev/null </dev/null | grep -q -e --torch-backend && tell uv "$found"
    done
    indexes
    wait
}

# Where uv would fetch a Python from; one with settings of its own, or behind a proxy, has ways that are not seen here.
sources() {
    proxy=${ALL_PROXY-}${all_proxy-}${HTTPS_PROXY-}${https_proxy-}$(pip_says proxy "${PIP_PROXY-}")
    if [ -z "$asker" ] || [ -n "$proxy" ] || own_settings; then return; fi
    "$asker" -c "$ask_sources" "$seconds" ${UV_PYTHON_INSTALL_MIRROR:-https://github.com https://releases.astral.sh} 2>/dev/null
}

# A host whose uv has settings of its own is not asked: they say more than pip's.
indexes() {
    if own_settings; then return; fi
    [ -n "$asker" ] || return 0
    certificates
    asked=
    if no_index; then tell no_index; fi
    no_index || asked="$(default_index) $(more_indexes) $further"
    proxy=$(pip_says proxy "${PIP_PROXY-}")
    pass http_proxy "$proxy"
    pass https_proxy "$proxy"
    SKY_INDEXES=$asked SKY_LINKS="${UV_FIND_LINKS-} $(pip_says find-links "${PIP_FIND_LINKS-}")" \
        "$asker" -c "$ask_indexes" "$seconds" "$want" "$(uname -m)" $builds $sizes 2>/dev/null
}

interpreters() {
    for one in "python$want" python3 python; do command -v "$one"; done
    for one in /usr/bin /usr/local/bin "$HOME/.local/bin" /opt/*/bin "$HOME"/*conda*/bin \
        "$HOME"/*conda*/envs/*/bin "$HOME/.pyenv/versions/$want".*/bin "$HOME"/.local/share/uv/python/*/bin "$folder"/python/*/bin; do
        if [ -x "$one/python$want" ]; then echo "$one/python$want"; fi
    done
}
main </dev/null
