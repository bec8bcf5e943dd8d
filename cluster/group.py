"""What the launcher asks of a group of workers, wherever they run: here, or on the machines of a cluster."""

from collections.abc import Mapping
from types import TracebackType
from typing import Protocol

from rung.cluster.failures import Ended
from rung.cluster.local import Event, WorkerSpec
from rung.cluster.memory_trace import Sample
from rung.cluster.verdict import Verdict
from rung.strategies.plan import DeviceType


class Samples(Protocol):
    """Host memory over the last minutes."""

    def samples(self) -> tuple[Sample, ...]:
        """All kept samples, oldest first; of several machines, those of the one with the least left."""


class Group(Protocol):
    """Workers of ranks 0 to world - 1 that are running. See `rung.cluster.local.Workers` for what each method does."""

    world: int
    specs: tuple[WorkerSpec, ...]
    ends: list[Ended]

    @property
    def memory(self) -> Samples:
        """What was sampled of the workers' memory."""

    @property
    def alive(self) -> tuple[int, ...]:
        """Ranks that have not ended."""

    def pids(self) -> dict[int, int]:
        """Process of each living rank, on its own machine."""

    def poll(self, timeout_s: float = 0.0) -> list[Event]:
        """What has happened since the last call, in order."""

    def send(self, rank: int | None, value: object) -> None:
        """Sends `value` to one rank or to all. Never blocks."""

    def heartbeats(self) -> dict[int, tuple[int, str, float]]:
        """(step, phase, age in seconds) of the last heartbeat of each living rank."""

    def stacks(self, rank: int, deadline_s: float = 2.0) -> str:
        """Python stacks of a living worker."""

    def signal(self, rank: int, number: int) -> None:
        """Sends a signal to one worker."""

    def stop(self, grace_s: float = 10.0, *, reason: str = "") -> None:
        """Ends all workers and everything below them."""

    def verdict(self, *, device: DeviceType = "cpu", hung: Mapping[int, str] | None = None) -> Verdict | None:
        """One screen about why the workers ended; None if all ended well."""

    def __enter__(self) -> "Group":
        """A context manager that ends with `stop`."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
