"""Accelerators by name: known kinds, their spellings, and the names that drivers use.

``sky.accelerators.A100()`` and ``sky.accelerators.T4(count=2)`` create an `Accelerator`; a dash in
a name is written as an underscore (``A100_80GB``).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from skymagic.errors import RequestError, collect_mistakes
from skymagic.plan.suggest import did_you_mean, suggesting


@dataclass(frozen=True)
class AcceleratorKind:
    """Properties of one kind of accelerator.

    Attributes:
        name: the canonical name, as users, SkyPilot and cloud providers write it.
        memory: its memory in GB.
        cuda: True if it runs CUDA programs.
        aliases: other accepted spellings.
    """

    name: str
    memory: int
    cuda: bool = True
    aliases: tuple[str, ...] = ()


# Memory sizes are the vendor's. If a name exists in several sizes, the bare name is the smallest.
_CUDA = {
    6: "RTXA2000",
    8: "M60 P4 RTX3070 RTX4060 RTX4060Ti",
    10: "RTX3080",
    11: "RTX2080Ti",
    12: "K80 RTX3060 RTX3080Ti RTX4070 RTX4070Ti RTX5070",
    16: "A2 A16 P100 RTX4080 RTX4080-SUPER RTX5070Ti RTX5080 RTXA4000 T4 T4G V100",
    20: "RTX4000-Ada",
    24: "A10 A10G A30 L2 L4 P40 RTX3090 RTX3090Ti RTX4090 RTX4090D RTX6000 RTXA5000 RTXPRO4000",
    32: "RTX5090 RTX5000-Ada RTXPRO4500 V100-32GB V100S",
    40: "A100 A800",
    48: "A40 L20 L40 L40S RTX6000-Ada RTX8000 RTXA6000 RTXPRO5000",
    80: "A100-80GB A800-80GB H100 H800",
    96: "GH200 H20 RTXPRO6000",
    141: "H200",
    192: "B200 GB200",
    288: "B300 GB300",
}
"""Maps GB to accelerators that run CUDA programs."""
_OTHERS = {
    32: "Gaudi Inferentia2 Trainium",
    64: "MI210",
    96: "Trainium2",
    128: "MI250X",
    192: "MI300X",
    256: "MI325X",
}
_ALIASES = {
    "A100": "A100-40GB A100-SXM4 A100-SXM4-40GB A100-PCIE-40GB",
    "A100-80GB": "A100-80 A100-SXM4-80GB A100-SXM-80GB A100-PCIE-80GB",
    "H100": "H100-80GB H100-SXM H100-SXM5 H100-PCIE",
    "H200": "H200-SXM H200-141GB",
    "RTXA2000": "A2000",
    "RTXA4000": "A4000",
    "RTXA5000": "A5000",
    "RTXA6000": "A6000",
    "V100": "V100-16GB V100-SXM2 V100-SXM2-16GB",
    "V100-32GB": "V100-32 V100-SXM2-32GB",
    "Gaudi": "Gaudi-HL-205",
}
KINDS = tuple(
    AcceleratorKind(name, memory, cuda, tuple(_ALIASES.get(name, "").split()))
    for table, cuda in ((_CUDA, True), (_OTHERS, False))
    for memory, names in table.items()
    for name in names.split()
)
NAMES = tuple(sorted(kind.name for kind in KINDS))

_VENDORS = {"NVIDIA", "TESLA", "GEFORCE", "QUADRO", "AMD", "INSTINCT", "GRAPHICS", "CORPORATION"}
# Words that distinguish products: an RTX 4070 Ti is not an RTX 4070.
_VARIANTS = {"TI", "SUPER", "D", "LAPTOP", "MAX", "ADA", "BLACKWELL", "MIG", "MOBILE"}


def _spelling_key(name: str) -> str:
    return re.sub(r"[\s_-]+", "", name).casefold()


# Families of EC2's machine types, which users may name instead of accelerators.
_MACHINE_FAMILIES = {
    "g4dn": "T4:1",
    "g5": "A10G:1",
    "g6": "L4:1",
    "g6e": "L40S:1",
    "p3dn": "V100-32GB:8",
    "p4d": "A100:8",
    "p4de": "A100-80GB:8",
    "p5": "H100:8",
    "p5e": "H200:8",
    "p5en": "H200:8",
    "p6b200": "B200:8",
    "p6b300": "B300:8",
}
_NEURON = re.compile(r"(?:trn|inf)\d|trainium|inferentia|neuron")
NOT_CUDA = "ranks run CUDA programs, as on T4, L4, A10G, L40S, A100, H100"
_BY_KEY = {
    _spelling_key(spelling): kind for kind in KINDS for spelling in (kind.name, *kind.aliases)
}


def kind(name: str) -> AcceleratorKind:
    """Return the accelerator `name`, in any case, with dashes, underscores or blanks.

    Raises RequestError for an unknown name; the message suggests the nearest one.
    """
    if (known_kind := _BY_KEY.get(_spelling_key(name))) is None:
        if _NEURON.match(_spelling_key(name)):
            raise RequestError(
                f"{name} is not supported: it has AWS's own accelerators, and {NOT_CUDA}"
            )
        if (
            accelerator := _MACHINE_FAMILIES.get(_spelling_key(name.partition(".")[0]))
        ) is not None:
            raise RequestError(
                f"{name!r} is a type of machine: name its accelerators, as in --gpu {accelerator}"
            )
        nearest = did_you_mean(name, NAMES) or f"; available: {', '.join(NAMES)}"
        raise RequestError(f"no accelerator is called {name!r}{nearest}")
    return known_kind


def canonical(name: str) -> str:
    """Return the canonical spelling of `name`: ``"a100_80gb"`` is ``"A100-80GB"``.

    Raises RequestError as `kind` does.
    """
    return kind(name).name


def matches(name: str, driver_name: str) -> bool:
    """Return True if a device with this driver name is an accelerator called `name`.

    A name without a size matches every size: ``"NVIDIA A100-SXM4-80GB"`` is an A100 and an
    A100-80GB. A part of a device (MIG) and a variant (Ti, Laptop) are not the device itself.
    """
    product, _ = _product(driver_name)
    wanted_product, size = _product(canonical(name))
    return product == wanted_product and (size is None or size in _product_words(driver_name))


def canonical_device(driver_name: str) -> str:
    """Return the canonical name of the device with this driver name: ``"H200"``.

    For an unknown device, return the driver's name without the vendor: ``"TITAN Xp"``.
    """
    matching = [name for name in NAMES if matches(name, driver_name)]
    if not matching:
        return driver_name.removeprefix("NVIDIA ")
    # A100-80GB rather than A100
    return max(matching, key=lambda name: _product(name)[1] is not None)


def _product_words(name: str) -> list[str]:
    """Return upper-case words without the vendor's, with numbers joined to their product.

    For example, RTX 4090 becomes RTX4090.
    """
    joined = re.sub(
        r"\bRTX[\s-]+(PRO[\s-]+)?(?=[A-Z]?\d)",
        lambda match: "RTXPRO" if match[1] else "RTX",
        name.upper(),
    )
    joined = re.sub(r"(?<=\d)(TI|ADA|D)\b", r" \1", joined)
    return [word for word in re.split(r"[^A-Z0-9.]+", joined) if word and word not in _VENDORS]


def _product(name: str) -> tuple[tuple[str, ...], str | None]:
    """Return ((model, variants in order), memory size or None)."""
    model, *attributes = _product_words(name) or [""]
    size = next((word for word in attributes if re.fullmatch(r"\d+GB", word)), None)
    # RTXPRO exists only as Blackwell, so that word is not a variant
    variants = _VARIANTS - {"BLACKWELL"} if model.startswith("RTXPRO") else _VARIANTS
    return (model, *sorted(variants.intersection(attributes))), size


@suggesting("an accelerator", {"n": "count", "number": "count", "gpus": "count"})
@dataclass(frozen=True)
class Accelerator:
    """A requested accelerator. Raises RequestError for an unknown name, and for a count below 1.

    Args:
        name: any accepted spelling; stored in canonical form.
        count: number per node.
    """

    name: str
    count: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", canonical(self.name))
        if self.count < 1:
            raise RequestError(
                f"at least 1 {self.name} per node, not {self.count}; without GPUs leave it out"
            )

    @classmethod
    def parse(cls, text: str) -> Accelerator:
        """Parse ``"A100"`` or ``"A100:8"``. Raises RequestError with all mistakes at once."""
        name, colon, count = (part.strip() for part in text.partition(":"))
        mistakes: list[str] = []
        with collect_mistakes(mistakes):
            name = canonical(name)
        if colon and not re.fullmatch(r"0*[1-9][0-9]{0,5}", count):
            mistakes.append(
                f"{count!r} is not a number of accelerators per node: write NAME:COUNT, as "
                "in A100:8"
            )
        if mistakes:
            raise RequestError(mistakes)
        return cls(name, int(count) if colon else 1)

    @property
    def cuda(self) -> bool:
        """True if it runs CUDA programs."""
        return kind(self.name).cuda

    @property
    def memory(self) -> int:
        """Memory of one accelerator, in GB."""
        return kind(self.name).memory

    def __str__(self) -> str:
        return f"{self.name}:{self.count}"


@dataclass(frozen=True)
class GpuChoice:
    """GPUs per node, requested by number or individually.

    Attributes:
        count: number of GPUs of any kind; 0 for none, None for all, or if `selectors` are set.
        selectors: numbers as in nvidia-smi, or UUIDs or their prefixes.
    """

    count: int | None = None
    selectors: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.selectors:
            return ",".join(self.selectors)
        return {None: "all", 0: "none"}.get(self.count, str(self.count))


def read_gpus(text: str) -> Accelerator | GpuChoice:
    """Parse ``all``, ``none``, ``4``, ``A100``, ``A100:4``, ``0,2`` or ``GPU-…``.

    Raises RequestError.
    """
    text = text.strip()
    if text.casefold() in ("all", "none"):
        return GpuChoice(0 if text.casefold() == "none" else None)
    entries = tuple(filter(None, map(str.strip, text.split(","))))
    if entries and ("," in text or re.match(r"(GPU|MIG)-", text)):
        malformed = [word for word in entries if not re.fullmatch(r"\d+|(GPU|MIG)-[\w/-]+", word)]
        repeated = [word for word in dict.fromkeys(entries) if entries.count(word) > 1]
        mistakes = [
            f"{word!r} is not a GPU: write numbers (0,2) or UUIDs (nvidia-smi -L)"
            for word in malformed
        ]
        mistakes += [f"GPU {word} is named twice" for word in repeated]
        if mistakes:
            raise RequestError(mistakes)
        return GpuChoice(selectors=entries)
    if text.isdigit():
        if int(text) == 0:
            raise RequestError(
                "0 is not a number of GPUs: write none, or 0, (with a comma) for the GPU "
                "with the number 0"
            )
        return GpuChoice(int(text))
    return Accelerator.parse(text)


def __getattr__(name: str) -> Callable[..., Accelerator]:
    if name.startswith("_") or not name[:1].isupper():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return partial(Accelerator, canonical(name))
    except RequestError as unknown:
        raise AttributeError(str(unknown)) from None


def __dir__() -> list[str]:
    return sorted({*globals(), *(name.replace("-", "_") for name in NAMES)})
