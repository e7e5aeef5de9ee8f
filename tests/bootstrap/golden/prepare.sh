tell() { printf '@sky %s\n' "$*"; }
folder='/scratch/it'"'"'s'
token=token
<_PREPARE>
