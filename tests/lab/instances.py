"""Real sshd's at the addresses of moto's instances: each boots with what its user data says, and ends when it is terminated.

::

    with ec2() as cloud, booting(cloud, tmp_path) as machines:
        notebook.run(machines.settings)

A machine takes its host key and the user's public key from the user data, as cloud-init does, and runs the watchdog from there, with
``shutdown`` and ``poweroff`` replaced by programs that end this instance alone.
"""

from __future__ import annotations

import base64
import getpass
import json
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from skymagic.kernels.agent import ending
from skymagic.providers.aws import boot, tags
from skymagic.runtime.rendezvous import free_port
from tests.conftest import MARK
from tests.lab import ec2 as lab
from tests.lab.ec2 import EC2, Answer, Call, CarryOut
from tests.lab.ec2_prices import few_types
from tests.lab.hosts import NAME, Host, closing, share_code
from tests.lab.metadata import Metadata


@dataclass
class Machines:
    """What has booted.

    Attributes:
        hosts: by instance id; those that have ended stay.
        env: variables of the next ones' sessions.
        metadata: what answers in the place of their metadata service; None for none.
        wrong_key: instances that boot with another host key than the one that they were given: which of a launch.
        silent: instances whose sshd never opens: which of a launch.
    """

    cloud: EC2
    folder: Path
    subnet: str
    port: int
    user: str = field(default_factory=getpass.getuser)
    hosts: dict[str, Host] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    metadata: Metadata | None = None
    wrong_key: tuple[int, ...] = ()
    silent: tuple[int, ...] = ()
    _watchdogs: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    _ended: set[str] = field(default_factory=set)
    _jobs: set[str] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _threads: list[threading.Thread] = field(default_factory=list)

    @property
    def settings(self) -> str:
        """A cell with which a notebook reaches them."""
        known = {
            "subnet": self.subnet, "use_private_ips": True, "ssh_port": self.port, "user": self.user,
            "endpoint_url": self.cloud.url, "deadline_factor": 0.05,
        }  # fmt: skip
        return f"%config SkyMagic.aws = {known!r}"

    def on_launch(self, call: Call, carry_out: CarryOut) -> Answer:
        """The effect of RunInstances: carried out, and the instances boot."""
        before = {each.id for each in lab.instances(call.region)}
        answer = carry_out()
        for number, each in enumerate(
            one for one in lab.instances(call.region) if one.id not in before
        ):
            if each.state == "running" and number not in self.silent:
                self._boot(
                    each,
                    json.loads(
                        base64.b64decode(call.fields["UserData"]).decode().partition("\n")[2]
                    ),
                    number,
                )
        return answer

    def on_terminate(self, call: Call, carry_out: CarryOut) -> Answer:
        """The effect of TerminateInstances."""
        answer = carry_out()
        for key, value in call.fields.items():
            if key.startswith("InstanceId.") and answer.status == 200:
                self.end(value)
        return answer

    def _named(self, call: Call, answer: Answer) -> list[Any]:
        """The instances that a call names, where it was carried out."""
        ids = {value for key, value in call.fields.items() if key.startswith("InstanceId.")}
        return (
            [each for each in lab.instances(call.region) if each.id in ids]
            if answer.status == 200
            else []
        )

    def _boot(self, instance: Any, config: dict[str, Any], number: int) -> None:
        self._jobs.add(
            next(each["value"] for each in instance.get_tags() if each["key"] == tags.JOB)
        )
        folder = self.folder / instance.id
        service = (
            {ending.VARIABLE: self.metadata.url(instance.id)} if self.metadata is not None else {}
        )
        env = {**self.env, **service}
        host = Host(instance.id, instance.private_ip, folder, folder / "authorized", env)
        # where something lies already no disk is mounted: nothing that tests do formats one of this machine
        share_code(host.home)
        (host.home / ".skymagic" / "kept").touch()
        host.authorized.write_text("".join(f"{key}\n" for key in config["ssh_authorized_keys"]))
        if number not in self.wrong_key:
            host.hostkey.write_text(config["ssh_keys"]["ed25519_private"])
        host.port = self.port
        host.start()
        self.hosts[instance.id] = host
        self._watch(instance, host, config)

    def _watch(self, instance: Any, host: Host, config: dict[str, Any]) -> None:
        script = next(
            one["content"] for one in config["write_files"] if one["path"] == boot.WATCHDOG_PATH
        )
        dog = start_watchdog(script, host, self.env)
        self._watchdogs[instance.id] = dog

        def wait() -> None:
            dog.wait()
            if instance.state == "running":  # the system has shut itself down
                behaviour = instance.instance_initiated_shutdown_behavior
                lab.set_state(
                    instance,
                    "terminated" if behaviour == "terminate" else "stopped",
                    "Client.InstanceInitiatedShutdown",
                )
                self.end(instance.id)

        self._threads.append(threading.Thread(target=wait, name=instance.id, daemon=True))
        self._threads[-1].start()

    def end(self, instance: str) -> None:
        """Cut an instance's power; twice is safe."""
        with self._lock:
            if instance in self._ended:
                return
            self._ended.add(instance)
        self._cut(instance)

    def _cut(self, instance: str) -> None:
        if (dog := self._watchdogs.get(instance)) is not None:
            dog.kill()
            dog.wait()
        if (host := self.hosts.get(instance)) is not None:
            host.power_cut()
        for thread in self._threads:
            if thread.name == instance and thread is not threading.current_thread():
                thread.join()  # it looks at the instance's state once more

    def watched(self, instance: str) -> bool:
        """Whether a watchdog runs there."""
        return instance in self._watchdogs and self._watchdogs[instance].poll() is None

    def wait_ended(self, seconds: float) -> None:
        """Wait until all watchdogs have ended, and what they end."""
        for thread in self._threads:
            thread.join(timeout=seconds)

    def forget(self) -> None:
        """No more faults, of calls or of machines."""
        self.cloud._rules.clear()
        self.cloud.calls.clear()
        self.wrong_key, self.silent = (), ()
        booting_rules(self)

    def close(self) -> None:
        """End all of them; what lies in folders that they share with this machine is gone with their disks."""
        for each in self.hosts:
            self.end(each)
        self.wait_ended(10)
        for job in self._jobs:
            for path in (
                *Path("/tmp").glob(f"skymagic-*{job}-*"),
                *Path("/dev/shm").glob(f"skymagic-*{job}-*"),
            ):
                shutil.rmtree(path, ignore_errors=True)


def start_watchdog(
    script: str, host: Host, env: dict[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Run a watchdog's script on a host. Its process ends, killed, when it would have shut the machine down."""
    programs = host.folder / "sbin"
    programs.mkdir(exist_ok=True)
    for name in ("shutdown", "poweroff"):
        path = programs / name
        path.write_text('#!/bin/sh\necho "$0 $@" >>"$SKYMAGIC_WATCHDOG_STATE/off"\nkill -9 $PPID\n')
        path.chmod(0o755)
    state = host.folder / "watchdog"
    environment = {
        **os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "HOME": str(host.home), NAME: host.mark,
        MARK: os.environ.get(MARK, ""), "SKYMAGIC_WATCHDOG_STATE": str(state), **(env or {}),
    }  # fmt: skip
    return subprocess.Popen(
        ["sh", "-c", script],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def booting_rules(machines: Machines) -> None:
    """Have launches boot machines, after all faults that were scripted before."""
    machines.cloud.on("RunInstances", machines.on_launch, times=1 << 30)
    machines.cloud.on("TerminateInstances", machines.on_terminate, times=1 << 30)
    few_types(machines.cloud)


@contextmanager
def booting(cloud: EC2, folder: Path, metadata: Metadata | None = None) -> Iterator[Machines]:
    """Machines for the launches of this cloud; at the end nothing may run on them any more."""
    subnet = lab.loopback_subnet()
    machines = Machines(cloud, folder, subnet, free_port("127.0.0.4"), metadata=metadata)
    booting_rules(machines)
    hosts: list[Host] = []
    with closing(hosts):
        try:
            yield machines
        finally:
            hosts += machines.hosts.values()
            machines.close()
