"""A training job that shares a host's accelerators with the mesh: `python examples/lease_training.py`.

It holds 8 GiB while it works, wherever there is room. A job that is a program of its own needs no code at all:
`weft mesh lease acquire --memory 8GiB -- python train.py`.
"""

import os
import time

from weft.client.leases import hold_memory

EPOCHS = 3

with hold_memory("8GiB", purpose="training", priority="low", on_waiting=print) as lease:
    os.environ.update(lease.environment())  # before the first import of torch or another CUDA library
    print(f"training on devices {lease.devices} of {lease.host}")
    for epoch in range(EPOCHS):
        lease.check()  # raises when the memory is another holder's by now
        time.sleep(1.0)  # the work
        print(f"epoch {epoch + 1} of {EPOCHS} done")
