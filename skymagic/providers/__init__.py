"""Providers: a small protocol for getting machines, and a table of implementations loaded on use.

provider          the protocol: plan, acquire, release
registry          selects a provider by class or name, finds and stops pools; entry points add more
local             ranks on this machine, which may outlive their notebook
head              reach the machines of a pool from its head
ssh               your own machines
environment_copy  copy one environment to several similar hosts along a chain
host_pools        find and end the user's pools on such machines, without a local record
cluster           shared by Slurm, Ray and Kubernetes: nodes, channels, release
holder            the script of a process that starts daemons in a scheduler's job or a container
channel_key       the key that authenticates notebook and nodes in a scheduler's channel
slurm             nodes of a Slurm cluster
slurm_jobs        requests to Slurm: scripts, jobs, and explanations of how jobs ended
kubernetes        pods of a Kubernetes cluster
kubernetes_api    requests to the API server: objects, exec as a channel, waits, explanations
ray               nodes of a Ray cluster
ray_driver        the process connected to Ray, and the actors on the nodes
aws/              machines rented from EC2
"""

from skymagic.providers.provider import PoolLocation as PoolLocation
from skymagic.providers.provider import Provider as Provider
from skymagic.providers.provider import RemotePool as RemotePool
from skymagic.providers.provider import RemotePools as RemotePools
from skymagic.providers.provider import Replaceable as Replaceable
from skymagic.providers.provider import Say as Say
from skymagic.providers.provider import Survey as Survey
from skymagic.providers.registry import AWS as AWS
from skymagic.providers.registry import LISTING as LISTING
from skymagic.providers.registry import SSH as SSH
from skymagic.providers.registry import TABLE as TABLE
from skymagic.providers.registry import Choice as Choice
from skymagic.providers.registry import Kubernetes as Kubernetes
from skymagic.providers.registry import Local as Local
from skymagic.providers.registry import Ray as Ray
from skymagic.providers.registry import Slurm as Slurm
from skymagic.providers.registry import find_pools as find_pools
from skymagic.providers.registry import names as names
from skymagic.providers.registry import provider_for as provider_for
from skymagic.providers.registry import stop as stop
from skymagic.providers.registry import with_provider as with_provider
