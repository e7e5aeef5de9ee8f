"""Messages that explain why a host cannot be set up and what to do about it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from skymagic.bootstrap.builds import shortage
from skymagic.bootstrap.facts import HostFacts
from skymagic.bootstrap.layers import layer_problems, missing_in_image
from skymagic.bootstrap.requirements import Requirements
from skymagic.plan.image import unsatisfied_requirements
from skymagic.plan.masking import masked
from skymagic.plan.units import size

OTHER_FOLDER = "name a folder where you may write with --env SKYMAGIC_HOME=/path"
MIN_FREE_KB = 300 * 1024
"""Free space below which no environment fits."""
DISK_FULL_KB = 20 * 1024
"""Free space below which a failure is blamed on the disk, regardless of its output."""


@dataclass(frozen=True)
class InstallFailure:
    """An installation that failed.

    Attributes:
        step: the step that failed.
        command: the command that failed; "" if the script itself ended.
        status: exit status; None if it is unknown.
        last: the last lines that the step printed.
        free_kb: free space at that moment.
        minor: the Python version that is required.
    """

    step: str
    command: str
    status: int | None
    last: tuple[str, ...] = ()
    free_kb: int | None = None
    minor: str = ""

    @property
    def reason(self) -> str:
        """The step that failed, with its command and its last output."""
        how = (
            "its process was killed"
            if self.status is None or self.status < 0
            else f"exit code {self.status}"
        )
        command = [f"  command: {self.command}"] if self.command else []
        output = [f"  | {line}" for line in self.last]
        return "\n".join([f"it cannot be set up: {self.step} failed ({how})", *command, *output])

    def remedy(self, facts: HostFacts) -> str:
        """Return what to do, if the last lines show the cause."""
        general_advice = "Nothing was left there. Fix this, then create the pool again."
        silent = "".join(f" Its index {url} does not answer ({why})." for url, why in facts.silent)
        return (advice(self, facts) or general_advice) + silent


_UV_CACHE = r"cache entry|cache is corrupt|hash mismatch|failed to extract archive"
_NO_CONNECTION = (
    r"connection (refused|reset|to .* timed out)|failed to establish|name or service not known|"
    r"temporary failure in name resolution|network is unreachable|error sending "
    r"request|failed to fetch|certificate"
)
_OTHER_PLATFORM = r"incompatible with the current platform|has no wheels with a matching"
_NO_PYTHON = r"no interpreter found|failed to download.*cpython|python-build-standalone"
_CONTRADICTION = (
    "The packages contradict each other: the lines above say which. Change --pip or the plugins' "
    "versions."
)
ADVICE = (
    (
        r"no space left|disk quota exceeded|errno 28|errno 122",
        "The disk is full ({free} free at {folder}). Make room there (unused environments are in "
        "{folder}/env), or name another folder with --env SKYMAGIC_HOME=/path.",
    ),
    (r"resolutionimpossible|conflicting dependencies", _CONTRADICTION),
    (
        r"only builds for cuda",
        "Let {host} reach https://download.pytorch.org, or name an index that has CPU builds with "
        "sky.Image(pip_indexes=[…]). To take the build for CUDA all the same, add --plugin torch "
        "and -y.",
    ),
    (
        _UV_CACHE,
        "uv's cache on {host} is damaged. Run `rm -r ~/.cache/uv` there (or `uv cache clean`): "
        "its contents are downloaded again.",
    ),
    (
        _OTHER_PLATFORM,
        "A package has no wheel for this kind of machine and Python {minor}: build one on {host}, "
        "and name that with --pip.",
    ),
    (
        _NO_PYTHON,
        "uv found no Python {minor} on {host} and could not fetch one. Install it there, let the "
        "host reach github.com (or set UV_PYTHON_INSTALL_MIRROR there), or name an interpreter "
        "with sky.Image(python='/path/to/bin/python').",
    ),
    (
        r"certificate.?verify.?failed|invalid peer certificate|unknownissuer",
        "{host} does not trust the certificate that its package index shows; a proxy that reads "
        "TLS may be between. Name the certificate of that proxy there in SSL_CERT_FILE or in pip's "
        "configuration (`global.cert`), or have it in the system's certificates.",
    ),
    (
        r"no matching distribution|could not find a version|not found in the (package "
        r"registry|provided package locations)|there (is|are) no versions? of|"
        r"no versions? of \S+ (is|are) available|only .* (is|are) available",
        "The package indexes that {host} uses do not have this. Check the name and the version, "
        "or add other indexes with sky.Image(pip_indexes=[…]).",
    ),
    (
        _NO_CONNECTION,
        "{host} does not reach its package index. Check the configuration of uv and pip there, "
        "an index that it reaches with sky.Image(pip_indexes=[…]), or use an existing environment "
        "with sky.Image(python='/path/to/bin/python').",
    ),
    (r"unsatisfiable|no solution found", _CONTRADICTION),
)


def blames_cache(failure: InstallFailure) -> bool:
    """Return True if the last lines are what uv prints when its cache is damaged."""
    return bool(re.search(_UV_CACHE, "\n".join(failure.last).lower()))


def blames_platform(failure: InstallFailure) -> bool:
    """Return True if a wheel does not run on the host."""
    return bool(re.search(_OTHER_PLATFORM, "\n".join(failure.last)))


def blames_network(failure: InstallFailure) -> bool:
    """Return True if the last lines say that a server could not be reached."""
    return bool(re.search(f"{_NO_PYTHON}|{_NO_CONNECTION}", "\n".join(failure.last).lower()))


def advice(failure: InstallFailure, facts: HostFacts) -> str:
    """Return advice for the error in the last lines, or "" if no known error is among them."""
    text = "\n".join(failure.last).lower()
    full = failure.free_kb is not None and failure.free_kb < DISK_FULL_KB
    for pattern, template in ADVICE:
        if re.search(pattern, text) or full:  # the first is about full disks
            free = _free(failure.free_kb)
            return template.format(
                folder=facts.folder, free=free, host=facts.hostname, minor=failure.minor
            )
    return ""


def _free(kb: int | None) -> str:
    return "it is unknown how much is" if kb is None else size(kb * 1024)


def explain_unusable(facts: HostFacts, requirements: Requirements) -> list[str]:
    """Explain why nothing can be set up on a host.

    Returns:
        Sentences that say what to do; empty if nothing is in the way.
    """
    problems = [
        *_safety(facts),
        *(_interpreter_problems(facts, requirements) if requirements.prepared else ()),
        *layer_problems(facts, requirements),
    ]
    if facts.code and (facts.ready or requirements.prepared):
        return problems
    needed = missing_in_image(requirements, facts)
    room = "" if facts.ready or requirements.prepared else shortage(needed, facts)
    short = [f"{room}: make room, or {OTHER_FOLDER}"] if room else []
    return [
        *problems,
        *(_folder_problems(facts, requirements) or short),
        *_python(facts, requirements),
    ]


def _safety(facts: HostFacts) -> list[str]:
    """Check that the folder is safe from other users, because programs in it will be run."""
    if facts.foreign:
        return [f"{facts.folder} belongs to another user ({facts.foreign}): {OTHER_FOLDER}"]
    if facts.exposed:
        return [
            f"other users may write to {facts.folder} ({facts.exposed}): see that what is in it "
            f"is yours, and run `chmod 700 {facts.folder}` there, or {OTHER_FOLDER}"
        ]
    return []


def _folder_problems(facts: HostFacts, requirements: Requirements) -> list[str]:
    if not facts.folder.startswith("/"):
        return [f"its folder {facts.folder!r} is not an absolute path: {OTHER_FOLDER}"]
    if facts.refusal:
        if "space" in facts.refusal.lower() or "quota" in facts.refusal.lower():
            return [
                f"its disk is full at {facts.folder} ({facts.refusal}): make room, or "
                f"{OTHER_FOLDER}"
            ]
        return [f"nothing can be written at {facts.folder} ({facts.refusal}): {OTHER_FOLDER}"]
    if facts.noexec and not requirements.prepared:
        return [
            f"programs cannot be run from {facts.noexec} (its file system is mounted noexec), so "
            f"compiled packages do not load: {OTHER_FOLDER}"
        ]
    if (
        facts.disk_kb is not None
        and facts.disk_kb < MIN_FREE_KB
        and not facts.ready
        and not requirements.prepared
    ):
        return [
            f"its disk is nearly full: {_free(facts.disk_kb)} free at {facts.folder}, and an "
            f"environment needs more than {_free(MIN_FREE_KB)}: make room, or {OTHER_FOLDER}"
        ]
    return []


def _python(facts: HostFacts, requirements: Requirements) -> list[str]:
    """Explain why no interpreter of the required version is available.

    The host has none and cannot fetch one, and the notebook has none for it either.
    """
    if not facts.unreached or facts.gets_python:
        return []
    minor = requirements.minor
    return [
        f"it needs Python {minor}, has {_pythons(facts)}, and reaches no place to fetch one from "
        f"({facts.unreached}): install Python {minor} there, set UV_PYTHON_INSTALL_MIRROR there "
        "to a place that it reaches, name an interpreter with "
        "sky.Image(python='/path/to/bin/python'), or start the notebook with a Python that the "
        "hosts have"
    ]


def _pythons(facts: HostFacts) -> str:
    return ", ".join(f"{python.path} ({python.version})" for python in facts.pythons) or "none"


def _interpreter_problems(facts: HostFacts, requirements: Requirements) -> list[str]:
    """Explain why the interpreter that the user named cannot be used."""
    named = (
        "name another with sky.Image(python='/path/to/bin/python'), or leave python out to have "
        "one made"
    )
    if not facts.pythons:
        return [f"{requirements.python} is not there, or does not start: {named}"]
    problems = []
    if facts.pythons[0].version != requirements.minor:
        problems.append(
            f"{requirements.python} is Python {facts.pythons[0].version} and this notebook runs "
            f"{requirements.minor}; functions travel only between equal versions: {named}"
        )
    if requirements.files:
        problems.append(
            f"the files {', '.join(path for path, _ in requirements.files)} cannot be installed "
            "into an interpreter that is used as it is: install them there, and leave them out"
        )
    lacks = list(unsatisfied_requirements(requirements.packages, facts.packages))
    if lacks:
        missing = ", ".join(
            f"{requirement} (it has {has})" if has else str(requirement)
            for requirement, has in lacks
        )
        packages = " ".join(f'"{requirement}"' for requirement, _ in lacks)
        problems.append(
            f"{requirements.python} is missing {missing}: run `{requirements.python} -m pip "
            f"install {packages}` there"
        )
    return problems


def lacks_uv(requirements: Requirements, facts: HostFacts, problem: str) -> tuple[str, str]:
    """Return the reason and the remedy if no uv can be got for a host's platform."""
    reason = (
        f"it cannot be set up: it has no uv, and none could be got for it here ({facts.system} "
        f"{facts.machine}): {masked(problem)}"
    )
    remedy = (
        "Install uv there, or name an interpreter that has all packages with "
        "sky.Image(python='/path/to/bin/python')."
    )
    return reason, remedy
