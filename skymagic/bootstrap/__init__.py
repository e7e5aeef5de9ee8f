"""Provisioning of a host: from an image to a Python environment with skymagic's code. Shell text is made by pure functions.

What goes over a host's connection; a host that is ready costs the first exchange only::

    notebook                                    host
      probe.sh                            →       changes nothing
                                          ←       facts: system, disk, GPUs, what is there already
      prepare.sh                          →       makes the folder of uploads
      uv.gz, skymagic's wheel, packages   →
      install.sh                          →       takes the environment's lock
                                          ←       steps, an installer's lines, a tick per second; `done` or `failed`

A host keeps everything in one folder, `Facts.folder`: ``env/KEY/``, an environment (`.ready` in it is written last, the commit
mark); ``code/DIGEST/``, skymagic as it runs in the notebook, on PYTHONPATH, so that an edit installs nothing anew;
``incoming/``, uploads; ``python/``, interpreters that uv fetched.

builds        which builds a host gets: CPU, or for its GPUs
disk          sh that lists and removes what skymagic keeps on a host, and what of it may go
additions     more packages for an environment that is in use
facts         a probe's answer as a value
indexes       what a host's package indexes answer and have, asked by its own Python
install       prepare.sh and install.sh
listing       what a new environment will hold, for a plan
messages      why a host cannot be set up, and what to do
origins       what the notebook's own distributions are installed from, and digests of their sources
own           the notebook's own distributions as wheels
packages      the part of install.sh that runs uv and pip
pip_settings  what a host's pip is configured with, for uv too
probe         probe.sh
copying       folders that go from host to host, before anything of ours is there
downloads     how far an installer's downloads are; pure
progress      the output of install.sh, parsed line by line
provision     the steps above over a connection
quoting       quoting for sh, and for every login shell
remote        a host's connection, uploads, and skymagic as it is installed there
requirements  what a host must have; its key names the environment
running       sh that finds and ends what of a user's pools runs on a host
uv            uv's program for a host's platform
versions      `pinned(names)`: requirements with the notebook's versions; `preferred(names)`: those of what they need
wheel         skymagic's running code as a wheel
wheelhouse    wheels for hosts that reach no index, resolved and downloaded here
"""
