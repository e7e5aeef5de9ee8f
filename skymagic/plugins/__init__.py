"""Plugins: set a framework up on the nodes before the first cell.

``sky.plugins.torch(backend="gloo")`` makes a plugin, as ``--plugin torch:backend=gloo`` does. Our
own plugins are listed in `TABLE`. Other packages add theirs through the entry-point group
``skymagic.plugins``, whose values are factories: functions with keyword parameters that return a
`Plugin`. Everything here is safe to import on a node, and loaded when it is used.

plugin          the dataclass `Plugin`, and `Cluster`, the facts about a planned pool
table           names, factories, options, entry points; order of hooks; sending plugins to ranks
integrations    ``@sky.integrations.torch``: a process group for one function
_torch/         PyTorch: its wheels, and a process group per pool that recovers from failures
_keras          Keras 3: one model trained on all ranks
_accelerate     Accelerate: the environment of ``accelerate launch``
_jax            JAX: one global device mesh
_huggingface    HuggingFace: its packages, and the hub's token
_reports        pass the progress of libraries' trainers to `sky.report`
_joblib         run tasks of joblib and scikit-learn on the pool's ranks
"""

from skymagic.plugins.plugin import Cluster as Cluster
from skymagic.plugins.plugin import Plugin as Plugin
from skymagic.plugins.table import GROUP as GROUP
from skymagic.plugins.table import TABLE as TABLE
from skymagic.plugins.table import Factory as Factory
from skymagic.plugins.table import attribute as __getattr__  # noqa: F401
from skymagic.plugins.table import attributes as __dir__  # noqa: F401
from skymagic.plugins.table import factory as factory
from skymagic.plugins.table import load as load
from skymagic.plugins.table import names as names
from skymagic.plugins.table import options as options
from skymagic.plugins.table import order as order
from skymagic.plugins.table import resolve as resolve
from skymagic.plugins.table import shadowing_packages as shadowing_packages
