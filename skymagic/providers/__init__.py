"""Where machines come from: a small protocol, and a table of names that are loaded on use.

provider  the seam: plan, acquire, release
choice    a provider as Python code names it, and by its name; entry points add third parties' own
local     ranks on this machine, which may outlive their notebook
head      the machines of a pool as they are reached from its head
ssh       machines of your own
passing   one environment for several hosts of a kind: the first makes it, and it goes on from host to host
found     the user's pools on such machines, asked by one script, found and ended without knowing of them
cluster   what Slurm, Ray and Kubernetes share: nodes given together, reached by a channel, kept by a holder, and given back
channel_key  the key by which notebook and nodes know each other in a scheduler's channel
slurm     nodes of a Slurm cluster
slurm_jobs  what is asked of Slurm: scripts, jobs and their ends in words
kubernetes  pods of a Kubernetes cluster
kubernetes_api  what is asked of its API server: objects, exec as a channel, waits and ends in words
ray       nodes of a Ray cluster
ray_driver  the process that is connected to Ray, and the actors on the nodes
aws/      machines rented from EC2
"""

from skymagic.providers.choice import AWS as AWS
from skymagic.providers.choice import LISTING as LISTING
from skymagic.providers.choice import SSH as SSH
from skymagic.providers.choice import TABLE as TABLE
from skymagic.providers.choice import Choice as Choice
from skymagic.providers.choice import Kubernetes as Kubernetes
from skymagic.providers.choice import Local as Local
from skymagic.providers.choice import Ray as Ray
from skymagic.providers.choice import Slurm as Slurm
from skymagic.providers.choice import listing as listing
from skymagic.providers.choice import names as names
from skymagic.providers.choice import placed as placed
from skymagic.providers.choice import serving as serving
from skymagic.providers.provider import Listable as Listable
from skymagic.providers.provider import ListedPool as ListedPool
from skymagic.providers.provider import Provider as Provider
from skymagic.providers.provider import Replaceable as Replaceable
from skymagic.providers.provider import Say as Say
from skymagic.providers.provider import Survey as Survey
