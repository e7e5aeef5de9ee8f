"""A rank: an ipykernel whose namespace, output and errors the notebook sees as its own."""
