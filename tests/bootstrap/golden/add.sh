tell() { printf '@sky %s\n' "$*"; }
folder='/home/it'"'"'s me/.skymagic'
env=KEY-Linux-x86_64
incoming=token
backend=cpu
no_cuda=yes
sent_links=''

<COMMON>

<OWN>

<BEGIN>
<_ADD>
<WATCHED>

<PIP_SETTINGS>

<PACKAGES>

requirements() {
    {
        printf '%s\n' '--extra-index-url https://user:pa$$'"'"'word@example.org/simple'
        printf '%s\n' pandas==3.0
        printf '%s\n' 'it'"'"'s'
        printf '%s\n' file:///home/it%27s%20me/.skymagic/incoming/token/my%20x-1.whl
        :
    } >"$drop/requirements.txt"
    {
        :
    } >"$drop/builds.txt"
    {
        printf '%s\n' numpy==2.0
        :
    } >"$drop/kept.txt"
    {
        printf '%s\n' six==1.0
        :
    } >"$drop/versions.txt"
    {
        :
    } >"$drop/renewed.txt"
    {
        :
    } >"$drop/own.txt"
}
main </dev/null 2>&1
