"""Stand-in GPUs: a driver, CUDA, torch.cuda and NCCL that act as NVIDIA's do where ranks, devices and backends matter.

::

    machine = Gpus(tmp_path / "gpus", [Gpu()] * 2)
    with opened(tmp_path, "%sky_pool --plugin torch", env=machine.environment()):
        ...
    machine.calls("set_device")            # what ranks did: rank, device number, uuid of that GPU

A process with that environment finds ``nvidia-smi`` and ``pynvml``, which answer for the machine, and a torch (the CPU build, loaded as
always) that says that it is built for CUDA. What is as with real ones:

- CUDA_VISIBLE_DEVICES takes numbers, UUIDs and their beginnings; the list ends at the first entry that is none; of parts of GPUs (MIG) a
  process sees one alone; it is read at CUDA's first use.
- A process that was forked from one that has used CUDA (``torch.cuda.is_available()`` is a use) cannot use it: RuntimeError.
- Where ranks of one NCCL group are on one device, NCCL refuses the group. (NCCL does so at the first collective, this one when the group is made.)
- nvidia-smi and NVML count all GPUs of the machine, whatever CUDA_VISIBLE_DEVICES says.

CUDA tensors there are none of: a collective on them cannot be tried here. This file is also what runs in those processes, and so imports
the standard library alone.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

VARIABLE = "STANDIN_GPUS"
"""In the environment of processes that have them: the folder of their machine."""
DUPLICATE = "Duplicate GPU detected : rank {0} and rank {1} both on CUDA device {2}"
FAILED = (
    "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that the latest NVIDIA driver is "
    "installed and running."
)


@dataclass(frozen=True)
class Gpu:
    """One GPU of a machine; memory in MiB.

    Attributes:
        uuid: "" for one made of its number; ``HOME`` in it becomes the name of the folder that the home is in, for hosts that share a driver.
        processes: (pid, its name, MiB) of those that use it.
        mig: its parts by profile: ``"1g.18gb"``; with any, MIG is on.
        mode: compute mode: Default, Exclusive_Process, Prohibited.
    """

    name: str = "NVIDIA H200"
    uuid: str = ""
    memory: int = 143_771
    used: int = 4
    processes: tuple[tuple[int, str, int], ...] = ()
    mig: tuple[str, ...] = ()
    mode: str = "Default"
    driver: str = "580.159.04"


@dataclass
class Gpus:
    """A machine with these GPUs, for processes that have its `environment`.

    Attributes:
        refuses: what nvidia-smi says instead of answering. hangs: it never answers.
        cuda: whether torch and jax are installed as builds for CUDA.
    """

    folder: Path
    gpus: Sequence[Gpu] = ()
    refuses: str = ""
    hangs: bool = False
    cuda: bool = True

    def __post_init__(self) -> None:
        here = str(Path(__file__).resolve())
        load = f"import importlib.util as u\ns = u.spec_from_file_location('standin_gpus', {here!r})\nm = u.module_from_spec(s)\n"
        load += "import sys\nsys.modules['standin_gpus'] = m\ns.loader.exec_module(m)\n"
        (self.folder / "bin").mkdir(parents=True)
        self.write()
        for name, version in (
            (("torch", f"{version_of('torch')}+cu128"), ("jax_cuda12_plugin", "0.10.2"))
            if self.cuda
            else ()
        ):
            about = self.folder / f"{name}-{version}.dist-info"
            about.mkdir()
            (about / "METADATA").write_text(
                f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n"
            )
        (self.folder / "sitecustomize.py").write_text(f"{load}m.install()\n")
        (self.folder / "pynvml.py").write_text(f"{load}globals().update(m.nvml())\n")
        program = self.folder / "bin" / "nvidia-smi"
        program.write_text(
            f"#!/bin/sh\n{VARIABLE}='{self.folder}' exec '{sys.executable}' -IS '{here}' \"$@\"\n"
        )
        program.chmod(0o755)

    def write(self) -> None:
        """Let what was changed in this object hold from now on."""
        about = {
            "gpus": [asdict(gpu) for gpu in self.gpus],
            "refuses": self.refuses,
            "hangs": self.hangs,
            "cuda": self.cuda,
        }
        path = self.folder / "machine.json.new"
        path.write_text(json.dumps(about))
        path.replace(self.folder / "machine.json")

    def environment(self, before: Mapping[str, str] = os.environ) -> dict[str, str]:
        """What a process must have in its environment beside `before`."""
        python = os.pathsep.join(filter(None, [str(self.folder), before.get("PYTHONPATH")]))
        path = os.pathsep.join([str(self.folder / "bin"), before.get("PATH", os.defpath)])
        return {VARIABLE: str(self.folder), "PYTHONPATH": python, "PATH": path}

    def calls(self, name: str = "") -> list[dict[str, Any]]:
        """What processes have asked CUDA and NCCL for, in order; of one function with its name."""
        try:
            lines = (self.folder / "calls.jsonl").read_text().splitlines()
        except FileNotFoundError:
            return []
        return [call for call in map(json.loads, lines) if name in ("", call["call"])]

    def forget(self) -> None:
        """`calls` begins anew."""
        (self.folder / "calls.jsonl").unlink(missing_ok=True)


def version_of(distribution: str) -> str:
    """The version that is installed here, without its label."""
    from importlib.metadata import version

    return version(distribution).partition("+")[0]


def uuid_of(number: int) -> str:
    """The UUID of a GPU that was given none."""
    return f"GPU-{number:08x}-5a5a-4b4b-8c8c-{number:012x}"


def mig_uuid(number: int, part: int) -> str:
    """The UUID of a part of a GPU."""
    return f"MIG-{number:08x}-{part:04x}-5d5d-9e9e-{number:012x}"


# -- what runs in those processes: the driver ----------------------------------------------------------------------------


def _folder() -> Path:
    return Path(os.environ[VARIABLE])


def _machine() -> dict[str, Any]:
    machine: dict[str, Any] = json.loads((_folder() / "machine.json").read_text())
    for number, gpu in enumerate(machine["gpus"]):
        gpu["uuid"] = (gpu["uuid"] or uuid_of(number)).replace(
            "HOME", Path(os.environ.get("HOME", "/")).parent.name
        )
    return machine


def visible(
    machine: Mapping[str, Any], environ: Mapping[str, str] = os.environ
) -> list[tuple[str, int]]:
    """(uuid, number of the GPU that it is or is of) of each device that CUDA shows to a process, in CUDA's order."""
    whole = [(gpu["uuid"], number) for number, gpu in enumerate(machine["gpus"])]
    parts = [
        (mig_uuid(number, part), number)
        for number, gpu in enumerate(machine["gpus"])
        for part in range(len(gpu["mig"]))
    ]
    said = environ.get("CUDA_VISIBLE_DEVICES")
    if said is None:
        return [device for device in whole if not machine["gpus"][device[1]]["mig"]] or parts[:1]
    found: list[tuple[str, int]] = []
    for word in map(str.strip, said.split(",")):
        if word.isdigit():
            fits = whole[int(word) : int(word) + 1]
        elif word.startswith("GPU-"):
            fits = [device for device in whole if device[0].startswith(word)]
        else:
            fits = [device for device in parts if word.startswith("MIG-") and device[0] == word]
        if len(fits) != 1:
            break
        if fits[0] in found:  # CUDA shows nothing where one is named twice
            return []
        found += fits
    return found[:1] if any(uuid.startswith("MIG-") for uuid, _ in found) else found


def nvidia_smi(arguments: Sequence[str]) -> int:
    """The program."""
    machine = _machine()
    while machine["hangs"]:
        time.sleep(60)  # until it is killed
    if machine["refuses"]:
        print(machine["refuses"])
        return 9
    query = {name: value for name, _, value in (argument.partition("=") for argument in arguments)}
    plain = "nounits" in query.get("--format", "")
    if "-L" in query or "--list-gpus" in query:
        _list(machine)
    elif "--query-compute-apps" in query:
        _rows(query["--query-compute-apps"], _applications(machine), plain)
    elif "--query-gpu" in query:
        rows = [_described(number, gpu) for number, gpu in enumerate(machine["gpus"])]
        return _rows(query["--query-gpu"], rows, plain)
    else:
        print("NVIDIA-SMI stand-in")
    return 0


def _list(machine: Mapping[str, Any]) -> None:
    for number, gpu in enumerate(machine["gpus"]):
        print(f"GPU {number}: {gpu['name']} (UUID: {gpu['uuid']})")
        for part, profile in enumerate(gpu["mig"]):
            print(f"  MIG {profile:<8} Device {part:>2}: (UUID: {mig_uuid(number, part)})")


def _described(number: int, gpu: Mapping[str, Any]) -> dict[str, str]:
    in_use = sum(nbytes for _, _, nbytes in gpu["processes"])
    return {
        "index": str(number), "name": gpu["name"], "gpu_name": gpu["name"], "uuid": gpu["uuid"], "gpu_uuid": gpu["uuid"],
        "driver_version": gpu["driver"], "memory.used": f"{gpu['used'] + in_use} MiB", "memory.total": f"{gpu['memory']} MiB",
        "utilization.gpu": "0 %", "ecc.errors.uncorrected.volatile.total": "0", "compute_mode": gpu["mode"],
        "mig.mode.current": "Enabled" if gpu["mig"] else "Disabled", "pci.bus_id": f"00000000:{number:02X}:00.0",
    }  # fmt: skip


def _applications(machine: Mapping[str, Any]) -> list[dict[str, str]]:
    return [
        {"gpu_uuid": gpu["uuid"], "pid": str(pid), "process_name": name, "name": name, "used_memory": f"{held} MiB", "used_gpu_memory": f"{held} MiB"}
        for gpu in machine["gpus"]
        for pid, name, held in gpu["processes"]
    ]  # fmt: skip


def _rows(names: str, rows: Iterable[Mapping[str, str]], plain: bool) -> int:
    asked = names.split(",")
    for row in rows:
        if unknown := [name for name in asked if name not in row]:
            print(f'Field "{unknown[0]}" is not a valid field to query.')
            return 2
        print(
            ", ".join(
                row[name].removesuffix(" MiB").removesuffix(" %") if plain else row[name]
                for name in asked
            )
        )
    return 0


def nvml() -> dict[str, Any]:
    """The names of the module pynvml that are used."""

    class NVMLError(Exception):
        pass

    def initialise() -> None:
        if _machine()["refuses"]:
            raise NVMLError(_machine()["refuses"])

    def by_index(number: int) -> dict[str, Any]:
        gpus = _machine()["gpus"]
        if not 0 <= number < len(gpus):
            raise NVMLError("Invalid Argument")
        return {**gpus[number], "number": number}

    def by_uuid(uuid: str | bytes) -> dict[str, Any]:
        word = uuid.decode() if isinstance(uuid, bytes) else uuid
        for number, gpu in enumerate(_machine()["gpus"]):
            if word == gpu["uuid"] or word in [
                mig_uuid(number, part) for part in range(len(gpu["mig"]))
            ]:
                return {**gpu, "number": number, "part": word.startswith("MIG-")}
        raise NVMLError("Not Found")

    def memory(gpu: Mapping[str, Any]) -> Any:
        return _Answer(
            used=gpu["used"] << 20,
            total=gpu["memory"] << 20,
            free=(gpu["memory"] - gpu["used"]) << 20,
        )

    def rates(gpu: Mapping[str, Any]) -> Any:
        if gpu.get("part"):
            raise NVMLError("Not Supported")
        return _Answer(gpu=10 * (gpu["number"] + 1), memory=5)

    return {
        "NVMLError": NVMLError, "nvmlInit": initialise, "nvmlShutdown": lambda: None, "nvmlDeviceGetHandleByIndex": by_index,
        "nvmlDeviceGetHandleByUUID": by_uuid, "nvmlDeviceGetMemoryInfo": memory, "nvmlDeviceGetUtilizationRates": rates,
        "nvmlDeviceGetCount": lambda: len(_machine()["gpus"]), "nvmlDeviceGetUUID": lambda gpu: gpu["uuid"],
        "nvmlDeviceGetName": lambda gpu: gpu["name"],
    }  # fmt: skip


class _Answer:
    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)


# -- torch and jax -------------------------------------------------------------------------------------------------------


def note(call: str, **values: Any) -> None:
    """Write down what this process asks for."""
    names = (
        "RANK",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "WORLD_SIZE",
        "NODE_RANK",
        "CUDA_VISIBLE_DEVICES",
    )
    place = {name.lower(): os.environ.get(name) for name in names}
    line = json.dumps({"call": call, "pid": os.getpid(), **place, **values}, default=str) + "\n"
    with open(
        _folder() / "calls.jsonl", "a"
    ) as file:  # one write of a short line: whole, also of several processes
        file.write(line)


class Cuda:
    """torch.cuda of one process: which devices it has, and what it has used."""

    def __init__(self) -> None:
        self.devices: list[tuple[str, int]] | None = None
        self.current = 0
        self.initialised = 0
        """The process that has initialised CUDA."""
        self.touched = 0
        """The process in which the driver was first asked."""

    def ask(self) -> list[tuple[str, int]]:
        """The driver's devices: from now on a process that is forked from this one has none."""
        if self.touched == 0:
            self.touched = os.getpid()
            note("driver")
        if self.devices is None:  # read once, at the first use
            machine = _machine()
            self.devices = [] if machine["refuses"] or machine["hangs"] else visible(machine)
        return self.devices

    def count(self) -> int:
        if os.environ.get("PYTORCH_NVML_BASED_CUDA_CHECK") == "1":
            return len(visible(_machine()))
        return len(self.ask())

    def initialise(self) -> None:
        if self.touched not in (0, os.getpid()):
            raise RuntimeError(
                "Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you must use the 'spawn' start method"
            )
        if not self.ask():
            raise RuntimeError("No CUDA GPUs are available")
        self.initialised = os.getpid()

    def index(self, device: Any = None) -> int:
        if isinstance(device, str):
            device = int(device.partition(":")[2] or self.current)
        number = getattr(device, "index", device)
        return self.current if number is None else int(number)

    def current_device(self) -> int:
        self.initialise()
        return self.current

    def set_device(self, device: Any) -> None:
        self.initialise()
        number = self.index(device)
        if not 0 <= number < len(self.ask()):
            raise RuntimeError("CUDA error: invalid device ordinal")
        self.current = number
        note("set_device", device=number, uuid=self.ask()[number][0])

    def properties(self, device: Any = None) -> Any:
        self.initialise()
        uuid, number = self.ask()[self.index(device)]
        gpu = _machine()["gpus"][number]
        return _Answer(
            name=gpu["name"],
            uuid=uuid.partition("-")[2],
            total_memory=gpu["memory"] << 20,
            major=9,
            minor=0,
        )

    def memory(self, device: Any = None) -> tuple[int, int]:
        self.initialise()
        gpu = _machine()["gpus"][self.ask()[self.index(device)][1]]
        return (gpu["memory"] - gpu["used"]) << 20, gpu["memory"] << 20

    def patch(self, torch: Any) -> None:
        """Let torch be one that is built for CUDA."""
        nothing = {
            name: (lambda *_, **__: 0)
            for name in (
                "synchronize",
                "empty_cache",
                "memory_reserved",
                "memory_allocated",
                "utilization",
                "max_memory_allocated",
            )
        }
        functions = {
            "is_available": lambda: self.count() > 0, "device_count": self.count, "set_device": self.set_device,
            "is_initialized": lambda: self.initialised == os.getpid(), "init": self.initialise, "_lazy_init": self.initialise,
            "current_device": self.current_device, "get_device_properties": self.properties,
            "get_device_name": lambda device=None: self.properties(device).name, "mem_get_info": self.memory,
            **nothing,
        }  # fmt: skip
        for name, function in functions.items():
            setattr(torch.cuda, name, function)
        torch.version.cuda = "12.8"
        torch.accelerator.is_available = functions["is_available"]
        torch.accelerator.current_accelerator = lambda check_available=False: (
            torch.device("cuda") if not check_available or self.count() else None
        )

    def uuid(self) -> str | None:
        """Of the current device; None where there is none."""
        return self.ask()[self.current][0] if self.ask() else None


CUDA = Cuda()


def patch_distributed(c10d: Any) -> None:
    """NCCL, as far as the groups that are made with it: gloo underneath, which no tensor ever reaches."""
    alive: list[
        Any
    ] = []  # torch holds the C++ half alone, and would give it back as a plain ProcessGroupGloo

    class Options:
        def __init__(self, *_: Any) -> None:
            self._timeout: Any = None
            self.is_high_priority_stream = False

    class ProcessGroupNCCL(c10d.ProcessGroupGloo):
        def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
            mine = CUDA.uuid()
            note(
                "nccl",
                group=options.group_name,
                group_rank=rank,
                size=size,
                uuid=mine,
                timeout=options._timeout,
            )
            if mine is None:
                raise c10d.ValueError(
                    "ProcessGroupNCCL is only supported with GPUs, no GPUs found!"
                )
            name = os.environ.get("STANDIN_HOST", os.uname().nodename)
            store.set(f"device {rank}", f"{name} {mine}")
            on = [store.get(f"device {other}").decode() for other in range(size)]
            again = [other for other in range(size) if other != rank and on[other] == on[rank]]
            if again:
                raise c10d.dist_backend_error(DUPLICATE.format(rank, again[0], mine))
            super().__init__(store, rank, size, options._timeout)
            alive.append(self)

        def abort(self) -> None:
            note("abort")
            super().abort()

        @staticmethod
        def _group_start() -> None:
            note("group start")

        @staticmethod
        def _group_end() -> None:
            note("group end")

    def dist_backend_error(words: str) -> Exception:
        import torch.distributed as dist

        return dist.DistBackendError(
            f"NCCL error in: ProcessGroupNCCL.cpp, invalid usage (run with NCCL_DEBUG=WARN for details)\n{words}"
        )

    ProcessGroupNCCL.Options = Options
    c10d.ValueError = ValueError
    c10d.dist_backend_error = dist_backend_error
    c10d.ProcessGroupNCCL, c10d._NCCL_AVAILABLE = ProcessGroupNCCL, True
    c10d._DEFAULT_PG_NCCL_TIMEOUT = c10d.default_pg_timeout
    init = c10d.init_process_group

    def init_process_group(backend: Any = None, *arguments: Any, **options: Any) -> None:
        alive.clear()
        note(
            "init_process_group",
            backend=backend,
            uuid=CUDA.uuid() if CUDA.initialised == os.getpid() else None,
        )
        init(backend, *arguments, **options)

    c10d.init_process_group = init_process_group


def patch_jax(jax: Any) -> None:
    """Writes down which devices a rank takes."""
    initialise = jax.distributed.initialize

    def told(*arguments: Any, **options: Any) -> None:
        settings = {
            name: value for name, value in os.environ.items() if name.startswith("XLA_PYTHON")
        }
        note(
            "jax.distributed.initialize",
            local_device_ids=list(options.get("local_device_ids") or ()),
            settings=settings,
        )
        initialise(*arguments, **options)

    jax.distributed.initialize = told


class Finder:
    """Patches modules when they have been imported."""

    def __init__(self) -> None:
        self.patches = {
            "torch": CUDA.patch,
            "torch.distributed.distributed_c10d": patch_distributed,
            "jax": patch_jax,
        }

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        patch = self.patches.get(name)
        if patch is None:
            return None
        import importlib.util

        del self.patches[name]  # the search below comes by here too
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self.patches[name] = patch
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            patch(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def install() -> None:
    """In each Python process that has the environment, at its start."""
    if VARIABLE in os.environ and _machine()["cuda"]:
        sys.meta_path.insert(0, Finder())


if __name__ == "__main__":
    sys.exit(nvidia_smi(sys.argv[1:]))
