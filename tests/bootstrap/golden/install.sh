tell() { printf '@sky %s\n' "$*"; }
folder='/home/it'"'"'s me/.skymagic'
env=KEY-Linux-x86_64
incoming=token
silent=''
want=3.11
python='/opt/my python/bin/python3.11'
uv=uploaded
wheel=skymagic-1.0-py3-none-any.whl
code=0123456789abcdef
backend=cpu
no_cuda=yes
sent_links=''
sent_mark=''
copied=''
keeps=''
downloading=''
wheels_url=file:///home/it%27s%20me/.skymagic/wheels/KEY-Linux-x86_64
adding=''
base=''

<_MAIN>

<_ENVIRONMENT>

<_PACKAGES>

<UV_SETTINGS>

requirements() {
    {
        :
    } >"$drop/kept.txt"
    {
        :
    } >"$drop/none.txt"
    {
        printf '%s\n' numpy==2.0
        printf '%s\n' 'it'"'"'s; echo $HOME'
        printf '%s\n' 'a[b]>=1,<2'
        printf '%s\n' file:///home/it%27s%20me/.skymagic/incoming/token/files/x-1.0-py3-none-any.whl
        :
    } >"$drop/requirements.txt"
    {
        printf '%s\n' pip
        :
    } >"$drop/pip.txt"
    {
        printf '%s\n' 'https://user:pa$$'"'"'word@example.org/simple'
        :
    } >"$drop/indexes.txt"
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
