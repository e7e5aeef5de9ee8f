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
copied=''
base=''

<COMMON>

<OWN>

<BEGIN>
<_MAIN>
<WATCHED>

<_INSTALL>

<PIP_SETTINGS>

<PACKAGES>

# An environment that sees the packages of the interpreter's own installation.
over_image() {
    attempt "making an environment over the image's packages" \
        "$python" -m venv --without-pip --system-site-packages "$made" && begun || return 1
    if ! grep -q '^[^-]' "$drop/requirements.txt"; then return 0; fi
    if ! "$made/bin/python" -m pip --version >/dev/null 2>&1; then ensure_pip || return 1; fi
    by_steps "installing packages with pip" \
        "$made/bin/python" -m pip install --progress-bar off
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
