"""Kubeflow's JAX programs in shape: a function that begins with jax.distributed.initialize(), its arguments from the environment."""


def train():
    import os

    import jax
    import jax.numpy as jnp
    from jax.experimental import multihost_utils

    jax.distributed.initialize(
        coordinator_address=os.environ["JAX_COORDINATOR_ADDRESS"],
        num_processes=int(os.environ["JAX_NUM_PROCESSES"]),
        process_id=int(os.environ["JAX_PROCESS_ID"]),
    )
    mine = jnp.ones(2) * (jax.process_index() + 1)
    total = multihost_utils.process_allgather(mine).sum().item()
    jax.distributed.shutdown()
    return [jax.process_count(), total]


train()
