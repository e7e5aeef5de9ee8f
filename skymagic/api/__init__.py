"""The Python face: Compute, @function, and the operators of lazy calls."""
