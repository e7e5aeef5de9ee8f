"""The machines of one pool and all that was made for them: made in order, given back whatever happens.

Each thing carries the job's tag from its first moment, so that giving back needs no list of what was made: it looks. What a launch
has answered is kept beside that, for EC2 shows new machines some seconds late, and of a launch whose answer was lost it is known
that more may be there than is shown.
"""

from __future__ import annotations

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

Say = Callable[[str], None]
LOOK_SECONDS, SOON_SECONDS = 20.0, 2.0
"""Between two questions whether the machines run, all of them in one call; and where one is asked about that was in sight until now."""


@dataclass
class RegionLaunches:
    """What was made in a region, as far as EC2 has answered."""

    known: set[str] = field(default_factory=set)
    """Instances."""
    uncertain: bool = False
    """Whether a launch is under way, or its answer was lost."""


class Lease:
    """The rented machines of one pool, with all that was made for them, until `release` gives it back."""

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
        self._looked = -math.inf  # when EC2 was last asked whether the machines run
        self._runs: dict[
            str, bool | None
        ] = {}  # what it said, by machine; None where it did not say
        self._asked: dict[str, float] = {}  # when somebody wanted to know it
        self._looking = threading.Lock()

    def take_up(self, region: str, ids: Sequence[str]) -> None:
        """Own machines that another notebook has rented."""
        self._regions[region] = RegionLaunches(set(ids))
        self._launches = ledger.launches(self.label.job)  # the token of the next one must be new

    def acquire(
        self, offers: Sequence[MachineOffer], count: int
    ) -> tuple[MachineOffer, list[RunningInstance]]:
        """So many machines of the first offer that gives them all: in one zone, of one type.

        Raises:
            CloudError: none does, with the reason of each; or what no other offer would mend. What was made is given back by
                `release`.
        """
        tried: list[str] = []
        useless: set[tuple[str, str, bool]] = set()
        for offer in offers:
            if (offer.region, offer.instance_type, offer.spot) in useless:
                continue
            where = f"{offer.instance_type}{' spot' if offer.spot else ''} in {offer.zone}"
            self._say(StartStep(f"asking for {count} × {where} …", "requested"))
            self._regions.setdefault(offer.region, RegionLaunches())
            try:
                return offer, self._of(offer, count)
            except CloudError as problem:
                self._end_launch(offer.region)
                if problem.kind not in ELSEWHERE:
                    raise
                if problem.kind == ErrorKind.QUOTA:
                    # a quota is of the whole region: its other zones would refuse the same
                    useless.add((offer.region, offer.instance_type, offer.spot))
                tried.append(f"{where}: {problem.reason}")
                self._say(tried[-1])
                last = problem
        if not tried:
            raise CloudError("capacity", "", "no suitable machines are offered")
        listed = "\n  ".join(tried)
        remedy = "other types (--gpu), other regions (--region a,b), fewer nodes; or the same a little later"
        if last.kind == ErrorKind.QUOTA:
            remedy = last.remedy
        elif offers[0].spot:
            remedy = f"the same without --spot rents them on demand; or {remedy}"
        raise CloudError(
            last.kind, last.code, f"no capacity for {count} machines:\n  {listed}", remedy
        ) from last

    def replace(self, offer: MachineOffer, gone: Collection[str]) -> list[RunningInstance]:
        """Other machines of the same offer in the place of these, which are ended.

        Raises:
            CloudError: there are none; the same call may be made again.
        """
        self._regions.setdefault(offer.region, RegionLaunches())
        self.end(offer.region, gone)
        before = set(self._regions[offer.region].known)
        try:
            return self._of(offer, len(set(gone)), head=False)
        except CloudError:
            self.end(offer.region, self._regions[offer.region].known - before)
            raise

    def end(self, region: str, ids: Collection[str]) -> None:
        """End some of the machines, and count them no more; twice is safe."""
        if new := set(ids) - self._ended:
            Release(self.clients, region, filters(job=self.label.job), new).terminate(new)
            self._ended |= new
            ledger.lose(self.label.job, len(new))

    def alive(self, region: str, instance: str) -> bool | None:
        """Whether EC2 says that a machine runs; None where it does not say. However many are asked about, it takes a few calls a minute."""
        if instance in self._ended:
            return False
        with self._looking:  # a thread for each machine that is out of sight
            now, factor = time.monotonic(), self.clients.deadline_factor
            followed = now < self._asked.get(instance, -math.inf) + LOOK_SECONDS * factor
            self._asked[instance] = now
            between = (LOOK_SECONDS if followed else SOON_SECONDS) * factor
            if self._runs.get(instance) is not False and now >= self._looked + between:
                self._look(region, {instance, *self._regions[region].known} - self._ended)
                self._looked = now
            return self._runs.get(instance)

    def _look(self, region: str, ids: Collection[str]) -> None:
        try:
            found = launch.describe(self.clients, region, sorted(ids))
        except CloudError:
            found = {}
        self._runs |= {
            one: found[one]["State"]["Name"] in ("pending", "running") if one in found else None
            for one in ids
        }

    def _of(self, offer: MachineOffer, count: int, *, head: bool = True) -> list[RunningInstance]:
        """Machines of an offer; several with GPUs near each other, where that is possible."""
        if offer.gpus and count > 1:
            try:
                near = network.placement_group(
                    self.clients, offer.region, self.label, self._launches + 1
                )
                return self._launched(offer, count, head, near)
            except CloudError as problem:
                if not network.placement_at_fault(problem):
                    raise
                self._end_launch(offer.region)
                self._say(
                    f"without a placement group, so not near each other in the network: {problem.reason}"
                )
        return self._launched(offer, count, head, "")

    def _launched(
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
        asked = launch.parameters(
            offer, count, image, network.NetworkPlace(subnet.id, group), self.user_data, self.settings, self.label,
            token=f"{self.label.job}-{self._launches}", near=near,
        )  # fmt: skip
        # from here until EC2 has answered, an interrupt or a lost answer may leave machines that nobody has named
        region.uncertain = True
        try:
            self._check_wanted()  # `release` says so before it looks at `uncertain`: one of both sees the other
            ids = launch.launch(clients, offer.region, asked)
        except CloudError as problem:
            region.uncertain = problem.kind in UNCERTAIN
            raise
        region.known |= set(ids)
        disk = max(self.settings.disk, image.disk)
        disks = count * disk * ledger.DISK_PRICE
        ledger.write(ledger.rent(offer, count, self.settings, self.label, self._launches, disks))
        region.uncertain = False
        running = launch.wait_running(clients, offer.region, ids)
        if head and offer.cards > 1 and not self.settings.use_private_ips:
            public = network.head_address(clients, offer.region, running[0].interface, self.label)
            running[0] = replace(running[0], public=public)
        return running

    def _check_wanted(self) -> None:
        """Raise CloudError where all is being given back, while a thread still wants a machine."""
        if self._closing:
            raise CloudError("ended", "", "the pool is being released")

    def _end_launch(self, region: str) -> None:
        """End what is left of a launch that has failed, before the next one; that it is over is waited for at the end."""
        there = self._regions[region]
        if there.known:
            Release(self.clients, region, filters(job=self.label.job), there.known).terminate(
                there.known
            )

    def release(self, *, exact: bool = True) -> None:
        """Give everything back, and wait until EC2 says so. An interrupt is heard when it is done; a second one at once.

        Args:
            exact: whether the machines were there until now, as far as anybody knows.

        Raises:
            CloudError: not all was given back; names what was not, and what bounds it.
        """
        if self._released:
            return
        self._closing = True
        problems: list[str] = []
        uninterrupted(lambda: problems.extend(self._release()))
        if problems:
            ends = next(one["Value"] for one in self.label.tags() if one["Key"].endswith(":ends"))
            listed = "\n  ".join(problems)
            raise CloudError(
                "internal", "", f"not everything of {self.label.job} could be released:\n  {listed}",
                f"skymagic down --all tries again, from any machine; the machines end themselves at {ends} at the latest",
            )  # fmt: skip
        self._released = True
        ledger.end(self.label.job, exact=exact)
        boot.remove_keys(self.label.job)

    def _release(self) -> list[str]:
        """Give back what there is; what could not be."""
        return [
            problem
            for name, there in self._regions.items()
            for problem in Release(
                self.clients, name, filters(job=self.label.job), there.known, there.uncertain
            ).run()
        ]


def uninterrupted(call: Callable[[], None]) -> None:
    """Do this to its end on a thread of its own; the first interrupt of the caller is raised afterwards, the second at once."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as problem:
            raised.append(problem)

    thread = threading.Thread(
        target=run, name="skymagic-release"
    )  # no daemon: the interpreter waits for it too
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
