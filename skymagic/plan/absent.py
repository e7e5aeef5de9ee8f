"""Names of Skyward that stand for something which is not here: a sentence for each, with what to write instead."""

from __future__ import annotations

_CLOUDS = (
    "Container GCP Hyperstack JarvisLabs LambdaCloud MassedCompute Novita RunPod Scaleway TensorDock VastAI Verda Vultr"
)
_FILES = "Storage Volume storage"
_COLLECTIONS = "barrier counter dict lock queue set"
_SERVICES = "App Client Session DockerImage containers metrics offers LogConfig OfferRepository"


def _sentences() -> dict[str, str]:
    groups = {
        _CLOUDS: "there is no provider {name}: pools are of this machine (sky.Local()) or of hosts that you reach over SSH, "
        "rented ones too (sky.SSH(\"user@host\"))",
        _FILES: "there is no {name}: %sky_put brings files to the nodes and %sky_get takes them back; what lies in a bucket is "
        "read in the function, with its own client (s3fs, boto3)",
        _COLLECTIONS: "there is no {name} that nodes share: calls return their values, and on the ranks the framework's own "
        "collectives serve (torch.distributed, jax)",
        _SERVICES: "there is no {name}: sky.Compute makes pools, sky.find finds them, and %sky_status shows them",
    }  # fmt: skip
    return {name: text.format(name=f"sky.{name}") for names, text in groups.items() for name in names.split()}


NAMES = _sentences()
"""Public names, as ``sky.NAME``."""

PROVIDERS = {name.lower(): NAMES[name] for name in _CLOUDS.split()}
"""Providers, as ``provider="NAME"``."""

PLUGINS = {
    "cuml": "there is no plugin cuml: RAPIDS' own switch needs none, `%load_ext cuml.accel` in a broadcast cell or "
    "`cuml.accel.install()` in a function, before scikit-learn is imported",
    "mig": "there is no plugin mig: partition the GPUs on the machine (nvidia-smi mig), and give each rank its part with "
    "CUDA_VISIBLE_DEVICES=MIG-… in a cell, before CUDA is used",
    "mps": "there is no plugin mps: start nvidia-cuda-mps-control on the machine, and ranks on one GPU share it",
}
"""Plugins, as ``sky.plugins.NAME``."""
