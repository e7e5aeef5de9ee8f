"""Provisioning of a host: turn an image into a Python environment that has skymagic's code.

Pure functions render the shell scripts. The exchange below goes over the host's connection. A host
that is ready costs only the first round trip. If skymagic's source was edited, its wheel and
install.sh follow; if the source of one of the notebook's own distributions was edited, the wheel of
that distribution follows::

    notebook      host
      probe.sh                            →       changes nothing
                                          ←       facts: system, disk, GPUs, what exists already
      uv.gz, skymagic's wheel, files      →       into an upload folder
      install.sh                          →       takes the environment's lock; uv installs
                                          ←       steps, uv's output, one tick per second;
                                                  `done` or `failed`

A host keeps everything in one folder, `HostFacts.folder`:

- ``env/KEY/``: an environment. Its `.ready` file is the commit mark and is written last. Its
  ``bin/uv`` installs later packages.
- ``code/DIGEST/``: skymagic as it runs in the notebook, put on PYTHONPATH, so that an edit does not
  reinstall anything.
- ``incoming/``: uploads.
- ``wheels/KEY/``: wheels of a new environment, while they are passed on to other hosts.
- ``python/``: interpreters that uv fetched.

builds        choose PyTorch's build for a host; contents of a new environment, for a plan
downloading   download the wheels of a lock file
facts         the probe's output as a value
install       install.sh
messages      reasons why a host cannot be set up, and remedies
layers        environments over the packages of a container's image
local_wheels  the notebook's own distributions: their origins, and wheels made of them
probe         probe.sh
progress      parse the output of install.sh line by line
provision     run the steps above over a connection; add packages to an environment in use
remote        the connection to a host, uploads, and skymagic as installed there
requirements  what a host must have, in the notebook's versions; its key names the environment
running       sh that lists and stops a user's pools on a host, and cleans up its disk
shell         sh shared by the scripts: quoting, and uv's settings from pip's configuration
wheel         skymagic's running code as a wheel
wheelhouse    what the notebook gets for hosts: uv, plans, and wheels where no index is reached
"""
