"""Plugins: what a framework needs on the nodes before the first cell, each with its side on a rank.

``sky.plugins.torch(backend="gloo")`` makes one, as ``--plugin torch:backend=gloo`` does. Ours stand in `TABLE`; packages
bring more through the entry-point group ``skymagic.plugins``, whose values are factories: functions with keyword
parameters that return a `Plugin`. Everything here is safe on a node, and loaded when it is used.

plugin          the dataclass `Plugin`, and `Cluster`: what it may know of a pool before there is one
table           names, factories, their options, entry points; the order of hooks; a plugin on its way to a rank
integrations    ``@sky.integrations.torch``: a process group for one function
_torch/         PyTorch: its wheels, a process group per pool, freed and formed anew after a failure
_keras          Keras 3: one model trained on all ranks
_accelerate     Accelerate: the environment of ``accelerate launch``
_jax            JAX: one global device mesh
_huggingface    HuggingFace: its packages, and the hub's token
_reports        what trainers of libraries know of their progress goes to `sky.report`
_joblib         joblib's tasks, and scikit-learn's, on the pool's ranks
"""

from skymagic.plugins.plugin import Cluster as Cluster
from skymagic.plugins.plugin import Plugin as Plugin
from skymagic.plugins.table import GROUP as GROUP
from skymagic.plugins.table import TABLE as TABLE
from skymagic.plugins.table import Factory as Factory
from skymagic.plugins.table import attribute as __getattr__  # noqa: F401
from skymagic.plugins.table import attributes as __dir__  # noqa: F401
from skymagic.plugins.table import beside as beside
from skymagic.plugins.table import factory as factory
from skymagic.plugins.table import load as load
from skymagic.plugins.table import names as names
from skymagic.plugins.table import options as options
from skymagic.plugins.table import order as order
from skymagic.plugins.table import resolve as resolve
