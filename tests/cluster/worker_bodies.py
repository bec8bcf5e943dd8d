"""Functions that test workers run. Importing this module must be cheap: the launcher's tests import it too."""

import ctypes
import os
import signal
import subprocess
import sys
import time
from typing import Any

from rung.cluster.link import Link, Stop


def echo(link: Link, payload: Any) -> None:
    link.send(("hello", link.rank, link.world, payload, os.getpid()))
    while not isinstance(value := link.poll(), Stop):
        if value is not None:
            link.send(("echo", value))
        time.sleep(0.001)


def all_reduce(link: Link, payload: Any) -> None:
    import torch
    import torch.distributed as dist

    store = link.store(30.0)
    dist.init_process_group("gloo", store=store, rank=link.rank, world_size=link.world)
    value = torch.tensor([float(link.rank + 1)])
    dist.all_reduce(value)
    link.send((value.item(), torch.get_num_threads()))
    dist.destroy_process_group()
