"""A notebook of accelerate's: the cell starts the processes."""

from accelerate import notebook_launcher


def train(rate):
    print("trained at", rate)


notebook_launcher(train, args=(0.1,), num_processes=2, mixed_precision="no")
