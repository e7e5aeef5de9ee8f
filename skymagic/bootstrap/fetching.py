"""The script by which one host chooses what several of its kind get, and finds where each wheel of it is; for its mirror."""

from __future__ import annotations

from skymagic.bootstrap.facts import Facts
from skymagic.bootstrap.indexes import INDEX_READER
from skymagic.bootstrap.install import BEGIN, COMMON, WATCHED, InstallPlan, requirements_function
from skymagic.bootstrap.packages import PACKAGES
from skymagic.bootstrap.pip_settings import PIP_SETTINGS
from skymagic.bootstrap.quoting import TELL, assignments
from skymagic.bootstrap.requirements import Requirements

SOURCES = "sources.json"
"""What the script leaves for this host's mirror alone: URLs, and with what words and variables they are reached."""

_LOOK_UP = (
    INDEX_READER
    + r'''
import hashlib
from concurrent.futures import ThreadPoolExecutor

place = sys.argv[4]
indexes = os.environ.get('SKY_INDEXES', '').split()
origins = []
with open(os.path.join(place, 'versions.txt')) as file:
    for line in file:
        if line.startswith('    # from ') and origins:
            origins[-1][1] = line[len('    # from '):].strip()
        elif re.match(r'[A-Za-z0-9._-]+==', line):
            origins.append([line.split()[0], ''])
wheels, pages, pins, rest = {}, {}, [], []
for name in os.listdir(os.path.join(place, 'uv')) if os.path.isdir(os.path.join(place, 'uv')) else ():
    wheels[name] = ['file://' + request.pathname2url(os.path.join(place, 'uv', name)), '']

def listed(pin, origin):
    """(file, URL, sha256, index) of each wheel of a pin that may fit."""
    name, version = pin.split('==')
    index = next((each for each in indexes if bare(each) == bare(origin)), origin)
    if '://' in origin:
        url = page_of(origin, name)
        found = [(file, url, digest) for file, url, _, _, digest in entries(get(url, index), url)]
    else:
        found = [(file, 'file://' + request.pathname2url(os.path.join(origin, file)), '') for file in os.listdir(origin)]
    return [(file, url, digest, index) for file, url, digest in found if version_of(file, name) == version]

def found(one):
    try:
        return listed(*one)
    except Exception:
        return []

with ThreadPoolExecutor(50) as pool:
    for (pin, origin), files in zip(origins, pool.map(found, origins)):
        if not files:
            rest.append(pin)
            continue
        digests = [digest for _, _, digest, _ in files]
        pins.append(pin + ''.join(' --hash=sha256:' + digest for digest in digests if all(digests)))
        for file, url, digest, index in files:
            page = hashlib.sha256(bare(index).encode()).hexdigest()[:16]
            pages.setdefault(page, []).append([file, digest])
            wheels.setdefault(file, [url, authorization(url, index)])
variables = ('SSL_CERT_FILE', 'ALL_PROXY', 'all_proxy', 'HTTP_PROXY', 'http_proxy', 'HTTPS_PROXY', 'https_proxy', 'NO_PROXY', 'no_proxy')
known = {name: os.environ[name] for name in variables if name in os.environ}
for name, value in (('sources.json', {'env': known, 'wheels': wheels}), ('pages.json', {'pins': pins, 'rest': rest, 'pages': pages})):
    with open(os.path.join(place, name), 'w') as file:
        json.dump(value, file)
'''
)
"""Run by the host's own Python: where the wheels are that uv has chosen. Of what no wheel is found, each host gets its own."""

_FETCH = r"""    if [ ! -w "$HOME" ]; then
        UV_CACHE_DIR=$folder/cache/uv PIP_CACHE_DIR=$folder/cache/pip
        export UV_CACHE_DIR PIP_CACHE_DIR
    fi
    made=$drop/tools
    step "writing the list of packages" requirements
    answering
    step "making room for a download" tools
    # pip is for what is installed later by hand
    { cat "$drop/requirements.txt"; echo pip; if [ -z "$had" ]; then echo uv; fi; } >"$drop/all.txt"
    step "choosing versions with uv" "$uv" pip compile --quiet --no-header --no-annotate --emit-index-annotation \
        --python "$made/bin/python" "$drop/all.txt" -c "$drop/builds.txt" -o "$drop/versions.txt"
    if takes_cuda "$drop/versions.txt"; then refuse_cuda; fi
    step "looking where they are" look_up
    tell done
    kill "$ticker" 2>/dev/null
    rm -rf "$made" "$drop/pip"
    exit 0
}

# A host without uv gets it by pip, and passes it on like the rest.
tools() {
    had=$uv
    if [ -z "$uv" ]; then
        "$python" -m venv "$drop/pip" && "$drop/pip/bin/python" -m pip wheel $quick --no-deps -w "$drop/uv" uv &&
            "$drop/pip/bin/python" -m pip install --quiet --no-index "$drop"/uv/*.whl || return 1
        uv=$drop/pip/bin/uv
    fi
    as_pip
    "$uv" venv --quiet --no-project --python "$python" "$made"
}

look_up() {
    proxy=$(pip_says proxy "${PIP_PROXY-}")
    pass http_proxy "$proxy"
    pass https_proxy "$proxy"
    SKY_INDEXES="$(default_index) $(more_indexes) $(sed -n 's/^--extra-index-url //p' "$drop/requirements.txt")" \
        "$python" -c "$look_up" 30 "$want" "$(uname -m)" "$drop"
}
"""


def fetch_script(plan: InstallPlan, facts: Facts) -> str:
    """sh that chooses what an environment gets from indexes; uploads are in `plan.incoming`, where all of it stays."""
    names = {
        "folder": facts.folder,
        "want": plan.requirements.minor,
        "python": plan.python,
        "uv": plan.uv or "",
        "incoming": plan.incoming,
        "backend": plan.builds.backend,
        "no_cuda": "" if facts.accelerated or plan.builds.only_cuda else "yes",
        "silent": " ".join(plan.silent),
        "look_up": _LOOK_UP,
    }
    functions = [COMMON + WATCHED + BEGIN + _FETCH + PIP_SETTINGS + PACKAGES, requirements_function(plan, facts)]
    return "\n".join([TELL, *assignments(names), *functions, "main </dev/null 2>&1\n"])


def can_fetch(requirements: Requirements, facts: Facts) -> bool:
    """Whether such a host's packages can all come as wheels that another one has fetched; pure."""
    fitting = [each for each in facts.pythons if each.version == requirements.minor]
    plain = not (requirements.prepared or requirements.commands or requirements.scoped)
    wheels = all(path.endswith(".whl") for path in requirements.uploads)
    able = any(facts.uv or (each.venv and each.pip) for each in fitting)
    return plain and wheels and able and not facts.ready and not facts.without_index
