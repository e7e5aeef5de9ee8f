"""Provisioning of a host: turn an image into a Python environment that has skymagic's code.

Pure functions render the shell scripts. The exchange below goes over the host's connection. A host
that is ready costs only the first round trip. If skymagic's source was edited, its wheel and
install.sh follow; if the source of one of the notebook's own distributions was edited, the wheel of
that distribution follows::

    notebook      host
      probe.sh                            →       changes nothing
                                          ←       facts: system, disk, GPUs, what exists already
      uv.gz, skymagic's wheel, packages   →       into an upload folder
      install.sh                          →       takes the environment's lock
                                          ←       steps, installer output, one tick per second;
                                                  `done` or `failed`

A host keeps everything in one folder, `HostFacts.folder`:

- ``env/KEY/``: an environment. Its `.ready` file is the commit mark and is written last.
- ``code/DIGEST/``: skymagic as it runs in the notebook, put on PYTHONPATH, so that an edit does not
  reinstall anything.
- ``incoming/``: uploads.
- ``python/``: interpreters that uv fetched.

builds        wheels and builds that fit a host; contents of a new environment, for a plan
copying       copy folders from host to host before any of our code is installed there
facts         the probe's output as a value
indexes       query a host's package indexes with the host's own Python
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
shell         sh shared by the scripts: quoting, pip's settings, installing with uv or pip
wheel         skymagic's running code as a wheel
wheelhouse    files fetched by the notebook: uv, and wheels for hosts that reach no index
"""
