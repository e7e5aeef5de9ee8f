"""Query a host's package indexes with the host's own Python.

The queries find the indexes that answer, and the builds of packages that they have.
"""

from __future__ import annotations

ANSWER_SECONDS = 8
"""Seconds that all indexes of a host together have to answer. Indexes that do not are left out."""

INDEX_PROBE = r'''
import base64, json, os, re, ssl, sys, threading, time, zipfile, zlib
from urllib import error, parse, request

seconds, minor, machine = float(sys.argv[1]), sys.argv[2], sys.argv[3]
tag = 'cp' + minor.replace('.', '')
answered = set()

def bare(url):
    parts = parse.urlsplit(url)
    return parse.urlunsplit(parts._replace(netloc=parts.netloc.rpartition('@')[2])).rstrip('/')

def authorization(url, index):
    """What an index's own URL says of who asks, where this one is of the same host."""
    known = parse.urlsplit(index)
    if not known.username or known.hostname != parse.urlsplit(url).hostname:
        return ''
    words = parse.unquote(known.username) + ':' + parse.unquote(known.password or '')
    return 'Basic ' + base64.b64encode(words.encode()).decode()

def get(url, base=None):
    if url.startswith('file:'):
        path = request.url2pathname(parse.urlsplit(url).path)
        if os.path.isdir(path):
            path = os.path.join(path, 'index.html')
        with open(path, 'rb') as file:
            answered.add(base)
            return file.read()
    asked = request.Request(bare(url) + ('/' if url.endswith('/') else ''))
    asked.add_header('Accept', 'application/vnd.pypi.simple.v1+json, text/html;q=0.5')
    asked.add_header('User-Agent', 'pip (skymagic)')
    asked.add_header('Accept-Encoding', 'gzip')
    if authorization(url, base or url):
        asked.add_header('Authorization', authorization(url, base or url))
    with request.urlopen(asked, timeout=seconds) as reply:
        answered.add(base)  # also when the rest takes too long to be read
        data = reply.read()
        zipped = reply.headers.get('Content-Encoding') == 'gzip'
        return zlib.decompress(data, 31) if zipped else data

def entries(page, base):
    if page.lstrip()[:1] == b'{':
        for one in json.loads(page.decode())['files']:
            told = bool(one.get('core-metadata') or one.get('data-dist-info-metadata'))
            yield one['filename'], parse.urljoin(base, one['url']), one.get('size'), told
        return
    text = page.decode('utf-8', 'replace')
    for link, more in re.findall(r'<a\s[^>]*?href=["\']([^"\'#]+)([^>]*)>', text, re.I):
        url = parse.urljoin(base, link)
        yield parse.unquote(url.rpartition('/')[2]), url, None, '-metadata' in more

def fits(name):
    # coarse: no packaging here, and libc is left out; `platforms` decides where it counts
    python, abi, platform = (name[:-4].rsplit('-', 3) + ['', '', ''])[1:4]
    if not ({'py3', tag} & set(python.split('.')) or (abi == 'abi3' and python.startswith('cp3'))):
        return False
    here = 'macosx' if sys.platform == 'darwin' else 'linux'
    for_machine = 'universal' in platform or machine in platform
    return platform == 'any' or (here in platform and for_machine)

def normal(name):
    return re.sub(r'[-_.]+', '-', name).lower()

def version_of(file, name):
    """The version of a wheel that is of this project and may fit; else ''."""
    project, version = (file.split('-') + [''])[:2]
    ours = file.endswith('.whl') and fits(file) and normal(project) == normal(name)
    return version if ours else ''

wanted = [text.partition('==')[::2] for text in sys.argv[4:]]
indexes = list(dict.fromkeys(os.environ.get('SKY_INDEXES', '').split()))
links = os.environ.get('SKY_LINKS', '').replace(',', ' ').split()
begun = time.monotonic()
silent, offers = {}, set()

def cuda(name, url, base, told):
    """Whether a build without a label is for CUDA, by its dependencies; '-' if they are unknown."""
    try:
        if url.startswith('file:'):
            with zipfile.ZipFile(request.url2pathname(parse.urlsplit(url).path)) as wheel:
                names = wheel.namelist()
                metadata = next(n for n in names if n.endswith('.dist-info/METADATA'))
                text = wheel.read(metadata).decode()
        elif told:
            text = get(url + '.metadata', base).decode()
        else:
            return '-'
    except Exception:
        return '-'
    return 'cuda' if re.search(r'^Requires-Dist: (nvidia|cuda)-', text, re.M) else 'cpu'

def offered(name, version, page, base, source):
    for file, url, size, told in entries(page, base):
        has = version_of(file, name)
        if not has or (version and has.partition('+')[0] != version):
            continue
        if size is None and url.startswith('file:'):
            size = os.path.getsize(request.url2pathname(parse.urlsplit(url).path))
        # only builds of PyTorch differ, and "+cpu" or "+cu128" already says how
        labelled = '+' in has or not version or not normal(name).startswith('torch')
        build = '-' if labelled else cuda(file, url, source, told)
        offers.add((normal(name), has, str(size or '-'), build, bare(source)))

def ask(index, name, version):
    url = index.rstrip('/') + '/' + normal(name) + '/'
    try:
        page = get(url, index)
    except Exception as problem:
        reason = getattr(problem, 'reason', problem)
        refused = isinstance(reason, (ssl.SSLError, FileNotFoundError))
        if index in answered or refused or isinstance(problem, error.HTTPError):
            answered.add(index)
        elif 'timed out' not in str(problem):
            silent[index] = str(reason)
        return
    offered(name, version, page, url, index)

def look(place, name, version):
    if '://' in place:
        try:
            offered(name, version, get(place), place, place)
        except Exception:
            pass
    elif os.path.isdir(place):
        files = [{'filename': file, 'url': file} for file in os.listdir(place)]
        page = json.dumps({'files': files}).encode()
        offered(name, version, page, 'file://' + request.pathname2url(place) + '/', place)

def work(calls):
    while True:
        try:
            call, *args = calls.pop(0)
        except IndexError:
            return  # another was faster
        call(*args)

queues = [[(ask, index, *one) for one in wanted or [('packaging', '')]] for index in indexes]
queues += [[(look, place, *one) for place in links for one in wanted]]
threads = []
for queue in queues:  # one for each index: none waits for another
    for _ in range(min(6, len(queue))):
        threads.append(threading.Thread(target=work, args=(queue,), daemon=True))
        threads[-1].start()
for each in threads:
    each.join(max(0, begun + seconds - time.monotonic()))
print('@sky indexes', len(answered & set(indexes)))
if links:
    print('@sky links')
for index in indexes:
    if index not in answered:
        print('@sky silent', bare(index), silent.get(index, 'no answer in %.0f s' % seconds))
for one in sorted(list(offers)):
    print('@sky offer', *one)
sys.stdout.flush()
os._exit(0)  # those who still wait are not waited for
'''
"""Script run by an interpreter of the host (3.6 or newer) to query its package indexes.

It reports which indexes do not answer, and the builds that the others have. Arguments: seconds, the
minor version that is required, the machine, then names or ``name==version``. URLs are passed in
environment variables, because they may hold passwords and all users can see a command line.
"""
