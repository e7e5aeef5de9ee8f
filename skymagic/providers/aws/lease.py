"""The machines of one pool and everything created for them: created in order, always released.

Each resource carries the job's tag from its first moment, so releasing needs no list: it searches
by tag. The answers of launches are recorded in addition, because EC2 lists new machines some
seconds late, and because a launch whose answer was lost may have started machines not listed yet.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace

from skymagic.display.panel import StartStep
from skymagic.errors import CloudError
from skymagic.plan.requests import CloudSettings
from skymagic.providers.aws import boot, launch, ledger, network
from skymagic.providers.aws.clients import AwsClients
from skymagic.providers.aws.errors import ELSEWHERE, UNCERTAIN, ErrorKind
from skymagic.providers.aws.launch import RunningInstance
from skymagic.providers.aws.selection import MachineOffer
from skymagic.providers.aws.sweep import Release
from skymagic.providers.aws.tags import Label, filters

logger = logging.getLogger(__name__)

Say = Callable[[str], None]
LOOK_SECONDS, SOON_SECONDS = 20.0, 2.0
"""Seconds between two queries whether the machines run.

One call covers all machines. The shorter interval applies to a machine that was reachable until
now.
"""


@dataclass
class RegionLaunches:
    """Resources in a region whose creation EC2 has confirmed."""

    instances: set[str] = field(default_factory=set)
    """IDs of instances."""
    uncertain: bool = False
    """True while a launch is in progress, or after its answer was lost."""


class Lease:
    """The rented machines of one pool with everything created for them, until `release`."""

    def __init__(
        self, clients: AwsClients, settings: CloudSettings, label: Label, user_data: str, say: Say
    ) -> None:
        self.clients, self.settings, self.label, self.user_data = (
            clients,
            settings,
            label,
            user_data,
        )
        self._say = say
        self._regions: dict[str, RegionLaunches] = {}
        self._launches = 0
        self._released = self._closing = False
        self._ended: set[str] = set()  # machines that were ended before the others
        self._looked = -math.inf  # time of the last query whether the machines run
        # EC2's answer by machine; None if it did not say
        self._runs: dict[str, bool | None] = {}
        self._asked: dict[str, float] = {}  # time of the last `alive` call, by machine
        self._looking = threading.Lock()

    def adopt(self, region: str, ids: Sequence[str]) -> None:
        """Take ownership of machines that another notebook rented."""
        self._regions[region] = RegionLaunches(set(ids))
        # the token of the next launch must be new
        self._launches = ledger.last_launch(self.label.job)

    def acquire(
        self, offers: Sequence[MachineOffer], count: int
    ) -> tuple[MachineOffer, list[RunningInstance]]:
        """Rent machines from the first offer that has enough of them, in one zone and of one type.

        Raises:
            CloudError: no offer does, with the reason of each; or an error that no other offer
                would avoid. `release` releases what was created.
        """
        tried: list[str] = []
        useless: set[tuple[str, str, bool]] = set()
        for offer in offers:
            if (offer.region, offer.instance_type, offer.spot) in useless:
                continue
            description = f"{offer.instance_type}{' spot' if offer.spot else ''} in {offer.zone}"
            self._say(StartStep(f"asking for {count} × {description} …", "requested"))
            self._regions.setdefault(offer.region, RegionLaunches())
            try:
                return offer, self._of(offer, count)
            except CloudError as problem:
                self._end_launch(offer.region)
                if problem.kind not in ELSEWHERE:
                    raise
                if problem.kind == ErrorKind.QUOTA:
                    # a quota covers the whole region: its other zones would refuse too
                    useless.add((offer.region, offer.instance_type, offer.spot))
                tried.append(f"{description}: {problem.reason}")
                self._say(tried[-1])
                last = problem
        if not tried:
            raise CloudError("capacity", "", "no suitable machines are offered")
        listed = "\n  ".join(tried)
        remedy = (
            "other types (--gpu), other regions (--region a,b), fewer nodes; "
            "or the same a little later"
        )
        if last.kind == ErrorKind.QUOTA:
            remedy = last.hint
        elif offers[0].spot:
            remedy = f"the same without --spot rents them on demand; or {remedy}"
        raise CloudError(
            last.kind, last.cloud_code, f"no capacity for {count} machines:\n  {listed}", remedy
        ) from last

    def replace(self, offer: MachineOffer, lost: Collection[str]) -> list[RunningInstance]:
        """Rent replacements from the same offer for these machines, which are ended.

        Raises:
            CloudError: none are available; the call may be repeated.
        """
        self._regions.setdefault(offer.region, RegionLaunches())
        self.end(offer.region, lost)
        before = set(self._regions[offer.region].instances)
        try:
            return self._of(offer, len(set(lost)), head=False)
        except CloudError:
            self.end(offer.region, self._regions[offer.region].instances - before)
            raise

    def end(self, region: str, ids: Collection[str]) -> None:
        """End some of the machines and stop counting them. Twice is safe."""
        if new := set(ids) - self._ended:
            Release(self.clients, region, filters(job=self.label.job), new).terminate(new)
            self._ended |= new
            ledger.mark_lost(self.label.job, len(new))

    def alive(self, region: str, instance: str) -> bool | None:
        """Return whether EC2 reports a machine as running, or None if it does not say.

        Takes a few calls a minute, however many machines are queried.
        """
        if instance in self._ended:
            return False
        with self._looking:  # each unreachable machine has a thread that calls this
            now, factor = time.monotonic(), self.clients.deadline_factor
            followed = now < self._asked.get(instance, -math.inf) + LOOK_SECONDS * factor
            self._asked[instance] = now
            between = (LOOK_SECONDS if followed else SOON_SECONDS) * factor
            if self._runs.get(instance) is not False and now >= self._looked + between:
                self._refresh_states(
                    region, {instance, *self._regions[region].instances} - self._ended
                )
                self._looked = now
            return self._runs.get(instance)

    def _refresh_states(self, region: str, ids: Collection[str]) -> None:
        try:
            instances = launch.describe(self.clients, region, sorted(ids))
        except CloudError:
            instances = {}
        self._runs |= {
            instance_id: instances[instance_id].runs if instance_id in instances else None
            for instance_id in ids
        }

    def _of(self, offer: MachineOffer, count: int, *, head: bool = True) -> list[RunningInstance]:
        """Rent machines of an offer.

        Places several machines with GPUs near each other if possible.
        """
        if offer.gpus and count > 1:
            try:
                near = network.placement_group(
                    self.clients, offer.region, self.label, self._launches + 1
                )
                return self._launch(offer, count, head, near)
            except CloudError as problem:
                if not network.is_placement_failure(problem):
                    raise
                self._end_launch(offer.region)
                self._say(
                    "without a placement group, so not near each other in the network: "
                    f"{problem.reason}"
                )
        return self._launch(offer, count, head, "")

    def _launch(
        self, offer: MachineOffer, count: int, head: bool, near: str
    ) -> list[RunningInstance]:
        self._check_wanted()
        clients, region = self.clients, self._regions[offer.region]
        image = launch.image_for(clients, offer, self.settings)
        subnet = network.subnet(clients, offer.region, offer.zone, self.settings)
        source = network.caller_range(subnet, self.settings)
        group = network.security_group(
            clients, offer.region, subnet.vpc, source, self.settings, self.label
        )
        self._launches += 1
        run_parameters = launch.parameters(
            offer,
            count,
            image,
            network.NetworkPlace(subnet.id, group),
            self.user_data,
            self.settings,
            self.label,
            token=f"{self.label.job}-{self._launches}",
            near=near,
        )
        # from here until EC2 has answered, an interrupt or a lost answer may leave machines whose
        # IDs are unknown
        region.uncertain = True
        try:
            # `release` sets `_closing` before it reads `uncertain`: one of the two sees the other
            self._check_wanted()
            ids = launch.launch(clients, offer.region, run_parameters)
        except CloudError as problem:
            logger.warning("instances not launched: region=%s kind=%s", offer.region, problem.kind)
            region.uncertain = problem.kind in UNCERTAIN
            raise
        region.instances |= set(ids)
        disk = max(self.settings.disk, image.disk)
        disks = count * disk * ledger.DISK_PRICE
        ledger.write(ledger.rent(offer, count, self.settings, self.label, self._launches, disks))
        region.uncertain = False
        running = launch.wait_running(clients, offer.region, ids)
        logger.info("instances run: region=%s ids=%s", offer.region, ids)
        if head and offer.cards > 1 and not self.settings.use_private_ips:
            public = network.head_address(clients, offer.region, running[0].interface, self.label)
            running[0] = replace(running[0], public=public)
        return running

    def _check_wanted(self) -> None:
        """Raise CloudError if the pool is being released while a thread still requests machines."""
        if self._closing:
            raise CloudError("ended", "", "the pool is being released")

    def _end_launch(self, region: str) -> None:
        """End the remains of a failed launch before the next one.

        `release` waits until they are gone.
        """
        launches = self._regions[region]
        if launches.instances:
            Release(
                self.clients, region, filters(job=self.label.job), launches.instances
            ).terminate(launches.instances)

    def release(self, *, exact: bool = True) -> None:
        """Release everything and wait until EC2 confirms it.

        The first interrupt is raised after the release, a second one at once.

        Args:
            exact: True if the machines are known to have existed until now.

        Raises:
            CloudError: something could not be released; names it, and when it ends at the latest.
        """
        if self._released:
            return
        logger.info("machines are released: job=%s", self.label.job)
        self._closing = True
        problems: list[str] = []
        uninterrupted(lambda: problems.extend(self._release()))
        if problems:
            ends = next(tag["Value"] for tag in self.label.tags() if tag["Key"].endswith(":ends"))
            listed = "\n  ".join(problems)
            raise CloudError(
                "internal",
                "",
                f"not everything of {self.label.job} could be released:\n  {listed}",
                "skymagic down --all tries again, from any machine; "
                f"the machines end themselves at {ends} at the latest",
            )
        self._released = True
        ledger.end(self.label.job, exact=exact)
        boot.remove_keys(self.label.job)

    def _release(self) -> list[str]:
        """Release all resources and return descriptions of those that remain."""
        return [
            problem
            for name, launches in self._regions.items()
            for problem in Release(
                self.clients,
                name,
                filters(job=self.label.job),
                launches.instances,
                launches.uncertain,
            ).run()
        ]


def uninterrupted(call: Callable[[], None]) -> None:
    """Run a call to its end on a separate thread.

    The caller's first interrupt is raised afterwards, the second one at once.
    """
    raised: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as problem:
            raised.append(problem)

    # not a daemon thread, so that the interpreter waits for it too
    thread = threading.Thread(target=run, name="skymagic-release")
    thread.start()
    interrupt: KeyboardInterrupt | None = None
    while thread.is_alive():
        try:
            thread.join()
        except KeyboardInterrupt as stop:
            if interrupt is not None:
                raise
            interrupt = stop
    if raised:
        raise raised[0]
    if interrupt is not None:
        raise interrupt
