"""The plugin `keras`, and its side on a rank: ``fit`` trains one model on all ranks, on torch and on JAX.

plugin      `Plugin` keras: backend, options, hooks
fit         Keras' methods wrapped, so that it knows of the other ranks
on_torch    gradients averaged in each step (all_reduce)
on_jax      batches over the devices of all ranks, equal seeds, refusals
"""
