tell() { printf '@sky %s\n' "$*"; }
folder='/home/it'"'"'s me/.skymagic'
env=KEY-Linux-x86_64
incoming=token
silent=''
backend=cpu
no_cuda=yes
sent_links=''
copied=''
adding=yes
base=''

<_MAIN>

<_ENVIRONMENT>

<_PACKAGES>

<UV_SETTINGS>

requirements() {
    {
        printf '%s\n' numpy==2.0
        :
    } >"$drop/kept.txt"
    {
        :
    } >"$drop/none.txt"
    {
        printf '%s\n' pandas==3.0
        printf '%s\n' 'it'"'"'s'
        printf '%s\n' file:///home/it%27s%20me/.skymagic/incoming/token/files/my%20x-1.whl
        :
    } >"$drop/requirements.txt"
    {
        printf '%s\n' 'https://user:pa$$'"'"'word@example.org/simple'
        :
    } >"$drop/indexes.txt"
    {
        :
    } >"$drop/builds.txt"
    {
        printf '%s\n' six==1.0
        :
    } >"$drop/versions.txt"
    {
        :
    } >"$drop/own.txt"
}
main </dev/null 2>&1
