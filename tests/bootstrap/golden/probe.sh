tell() { printf '@sky %s\n' "$*"; }
folder=${SKYMAGIC_HOME:-"${HOME-}/.skymagic"}
want=3.11
key=3c1b16f2a0334248-py3.11
code=0123456789abcdef
ask_python=<PYTHON_PROBE>
ask_packages=<PACKAGES_PROBE>
names=''
seconds=8
further='https://user:pa$$'"'"'word@example.org/simple'
builds=''
ask_indexes=<INDEXES_PROBE>
ask_sources=<SOURCES_PROBE>
accelerated=''
base=''
jax=''
gpu_fields=index,uuid,name,memory.total,compute_mode,mig.mode.current
gpu_users=gpu_uuid,pid,process_name,used_memory
gpu_hold=skymagic/gpu/
<UV_SETTINGS>

<_BODY>
