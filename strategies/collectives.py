"""Talking between the workers of one plan: how the group is formed, and the one small exchange of every step."""

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Literal

import torch
import torch.distributed as dist

from rung.strategies.errors import WorkersFailed
from rung.strategies.plan import Plan

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

DEADLINE_S = 600.0
"""How long any collective may wait for a peer."""


def device_of(plan: Plan, rank: int) -> torch.device:
    """The device of this worker. A worker is shown only its own GPU (by UUID) where that is possible, so that its
    index is 0; where it sees several, LOCAL_RANK or else its rank tells which."""
    if plan.device != "cuda":
        return torch.device(plan.device)
    count = max(torch.cuda.device_count(), 1)
    index = int(os.environ.get("LOCAL_RANK", rank))
    return torch.device("cuda", index if index < count else index % count)


class Collectives:
    """The CPU side of a group of workers, gloo also where the devices speak NCCL. Alone, everything is a no-op."""

    def __init__(self, rank: int = 0, world: int = 1, group: "dist.ProcessGroup | None" = None) -> None:
        self.rank = rank
        self.world = world
        self._group = group

    @classmethod
    def form(cls, plan: Plan, rank: int, store: "Store | None", *, deadline_s: float = DEADLINE_S) -> "Collectives":
        """Joins the default process group over `store` (none is needed for one worker): gloo for CPUs, NCCL with a
        gloo group beside it for GPUs. Raises WorkersFailed if the others do not arrive within `deadline_s`."""
        if plan.devices == 1:
            return cls()
        if store is None:
            raise ValueError(f"{plan.devices} workers need a store to meet at")
        deadline = timedelta(seconds=deadline_s)
        store.set_timeout(deadline)
        cuda = plan.device == "cuda"
        with naming_peers(rank, plan.devices, "while the workers formed their group", deadline_s):
            dist.init_process_group(
                backend="nccl" if cuda else "gloo",
                store=store,
                rank=rank,
                world_size=plan.devices,
                timeout=deadline,
                device_id=device_of(plan, rank) if cuda else None,
            )
            # Its own connections: an exchange of the training loop never queues behind gradients.
            group = dist.new_group(backend="gloo", timeout=deadline)
        formed = cls(rank, plan.devices, group)
        formed._deadline_s = deadline_s
        return formed

    _deadline_s: float = DEADLINE_S

    def agree(self, values: list[float], op: Literal["sum", "max"] = "sum") -> list[float]:
        """`values`, summed or maximised over all ranks in float64: one all-reduce. All ranks call it alike.

        Raises WorkersFailed when a peer is gone or does not come within the deadline.
        """
        return self.begin(values, op)()

    def begin(self, values: list[float], op: Literal["sum", "max"] = "sum") -> Callable[[], list[float]]:
        """Starts what `agree` does and returns at once; the call that comes back waits for the others and gives the
        result. All ranks begin and end their exchanges in the same order. Both raise as `agree` does."""
        if self._group is None:
            return lambda: list(values)
        tensor = torch.tensor(values, dtype=torch.float64)
        kind = dist.ReduceOp.SUM if op == "sum" else dist.ReduceOp.MAX
        with self._naming_peers():
            work = dist.all_reduce(tensor, op=kind, group=self._group, async_op=True)

        def end() -> list[float]:
            with self._naming_peers():
                work.wait()
            return [float(value) for value in tensor.tolist()]

        return end

    def _naming_peers(self) -> contextlib.AbstractContextManager[None]:
        return naming_peers(self.rank, self.world, "while the workers agreed on a step", self._deadline_s)

    def close(self) -> None:
        """Leaves the group, within seconds whatever the peers do. Never raises."""
        if self._group is None:
            return
        self._group = None
        # Destroying an NCCL group waits for kernels that a dead peer may never let finish.
        leaver = threading.Thread(target=_leave, name="rung-leave-group", daemon=True)
        leaver.start()
        leaver.join(timeout=10.0)


def _leave() -> None:
    # The group may be broken already; the process ends soon, and there is nobody left to tell.
    with contextlib.suppress(Exception):
        dist.destroy_process_group()


@contextlib.contextmanager
def naming_peers(rank: int, world: int, when: str, deadline_s: float) -> Iterator[None]:
    """Turns what torch raises about a lost peer into WorkersFailed; other errors pass."""
    try:
        yield
    except (RuntimeError, dist.DistError) as error:
        if not is_peer_failure(error):
            raise
        raise WorkersFailed(
            f"rank {rank} of {world} lost its peers {when}: {str(error).splitlines()[0]}",
            hint=f"a worker died, or needed longer than {deadline_s:.0f} s; the verdict names the first that failed",
        ) from error


def is_peer_failure(error: BaseException) -> bool:
    """Whether `error` is torch's way of saying that another worker is gone or late, not a fault of this one."""
    if isinstance(error, dist.DistError):
        return True
    text = str(error)
    # gloo raises bare RuntimeErrors; each carries the path of its own source or one of these words.
    return isinstance(error, RuntimeError) and any(
        sign in text for sign in ("gloo/transport", "Connection closed by peer", "Timed out waiting", "Gloo ", "NCCL")
    )
