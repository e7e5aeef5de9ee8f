"""The plugin `keras`, and its side on a rank: Keras told of the other ranks, on torch and on JAX."""
