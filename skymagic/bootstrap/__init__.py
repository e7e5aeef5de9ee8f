"""Provisioning of a host: from an image to a Python environment with skymagic's code. Shell text is made by pure functions.

What goes over a host's connection. A host that is ready costs the first exchange only; where the source of skymagic was edited, its
wheel and install.sh follow, and where one of the notebook's own distributions was, its wheel::

    notebook                                    host
      probe.sh                            →       changes nothing
                                          ←       facts: system, disk, GPUs, what is there already
      uv.gz, skymagic's wheel, packages   →       into a folder of uploads
      install.sh                          →       takes the environment's lock
                                          ←       steps, an installer's lines, a tick per second; `done` or `failed`

A host keeps everything in one folder, `Facts.folder`: ``env/KEY/``, an environment (`.ready` in it is written last, the commit
mark); ``code/DIGEST/``, skymagic as it runs in the notebook, on PYTHONPATH, so that an edit installs nothing anew;
``incoming/``, uploads; ``python/``, interpreters that uv fetched.

builds        which wheels and builds fit a host; what a new environment will hold, for a plan
copying       folders that go from host to host, before anything of ours is there
facts         a probe's answer as a value
indexes       what a host's package indexes answer and have, asked by its own Python
install       install.sh
messages      why a host cannot be set up, and what to do
own           the notebook's own distributions: what they are installed from, and they as wheels
probe         probe.sh
progress      the output of install.sh, parsed line by line
provision     the steps above over a connection; more packages for an environment that is in use
remote        a host's connection, uploads, and skymagic as it is installed there
requirements  what a host must have, in the notebook's versions; its key names the environment
running       sh that finds and ends what of a user's pools runs on a host, and removes what lies there
shell         sh that scripts share: quoting, pip's settings, packages by uv or pip
wheel         skymagic's running code as a wheel
wheelhouse    what the notebook fetches for hosts: uv's program, and wheels for those that reach no index
"""
