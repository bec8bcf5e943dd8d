"""One launcher per run folder: a lease that its holder renews, on any store.

`lease.json` names the holder and is written anew every few seconds. Who finds it asks three things: is the holder a
process of this very machine that is dead (stale at once)? is it freshly written (refused)? does it change while we
watch (refused, else stale)? The last question needs no agreement between clocks. A taken lease is read back after a
moment, since some object stores cannot create exclusively; a holder that finds another's name in it has lost it.
"""

import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from rung.launcher.storage import Store
from rung.strategies.errors import ObjectMissing, RunLocked, StorageError

NAME = "lease.json"
LIFETIME_S = 60.0  # not renewed for this long: stale
SETTLE_S = 0.5  # after which a rival's write would be seen
_BEATS = 6  # renewals within a lifetime
_LIMIT_BYTES = 64 << 10


@dataclass(frozen=True, kw_only=True, slots=True)
class Holder:
    """What the lease says. `machine` and `started` tell whether `pid` is still the same process; times are Unix."""

    token: str
    host: str
    machine: str
    pid: int
    started: float
    lifetime_s: float
    written_s: float
    beat: int = 0

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> "Holder | None":
        """None for what is no lease: it protects nobody."""
        try:
            values = json.loads(data)
            return cls(
                token=str(values["token"]),
                host=str(values["host"])[:256],
                machine=str(values["machine"]),
                pid=int(values["pid"]),
                started=float(values["started"]),
                lifetime_s=min(3600.0, max(0.1, float(values["lifetime_s"]))),
                written_s=float(values["written_s"]),
                beat=int(values["beat"]),
            )
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            return None

    @classmethod
    def me(cls, lifetime_s: float) -> "Holder":
        """This process, with a new token."""
        return cls(
            token=secrets.token_hex(16),
            host=socket.gethostname(),
            machine=_machine(),
            pid=os.getpid(),
            started=_started(os.getpid()) or 0.0,
            lifetime_s=lifetime_s,
            written_s=time.time(),
        )

    def is_dead(self) -> bool:
        """True if the holder was a process of this machine and is gone; false also where we cannot know."""
        if not self.machine or self.machine != _machine():
            return False
        started = _started(self.pid)
        return started is None or abs(started - self.started) > 2.0

    def describe(self) -> str:
        age_s = max(0.0, time.time() - self.written_s)
        return f"process {self.pid} on {self.host}, last heard of {age_s:.0f} s ago"


class Lease:
    """Held from `acquire` to `release`; use as a context manager. A thread renews it."""

    def __init__(self, store: Store, mine: Holder, on_lost: Callable[[RunLocked], None] | None) -> None:
        self._store, self._mine, self._on_lost = store, mine, on_lost
        self._renewed = time.monotonic()
        self._stop = threading.Event()
        self._lost: RunLocked | None = None
        self._thread = threading.Thread(target=self._keep, name="lease", daemon=True)

    @classmethod
    def acquire(
        cls,
        store: Store,
        *,
        lifetime_s: float = LIFETIME_S,
        on_lost: Callable[[RunLocked], None] | None = None,
    ) -> "Lease":
        """Takes the lease on `store`. Raises `RunLocked` naming the holder if another launcher has it.

        Answers at once, except that a lease that looks stale is watched for two of its holder's renewals first.
        `on_lost` is called, from the lease's thread, if somebody else takes it or it cannot be renewed in time.
        """
        mine = Holder.me(lifetime_s)
        for _ in range(3):
            found = _read(store)
            if found is None:
                written = store.create_exclusive(NAME, mine.to_bytes())
                if not written and _read(store) is None:
                    store.delete(NAME)  # something is there that is no lease
            else:
                _refuse_unless_stale(store, found)
                now = _read(store)
                written = now is None or now.token == found.token
                if written:
                    store.write_atomic(NAME, mine.to_bytes())
            if not written:
                continue  # somebody was faster; look again
            time.sleep(SETTLE_S if store.remote or found is not None else 0.0)
            now = _read(store)
            if now is not None and now.token == mine.token:
                lease = cls(store, mine, on_lost)
                lease._thread.start()
                return lease
        raise _locked(store, _read(store) or mine)

    def check(self, *, fresh: bool = False) -> None:
        """Raises `RunLocked` if the lease is lost. `fresh` looks at the store; without it, the last renewal counts."""
        if fresh and self._lost is None:
            self._look()
        if self._lost is None and time.monotonic() - self._renewed > self._mine.lifetime_s:
            self._lose(self._not_renewed())
        if self._lost is not None:
            raise self._lost

    def release(self) -> None:
        """Gives the lease back; if that fails it becomes stale by itself. Never raises `StorageError`."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=self._mine.lifetime_s)
        if self._lost is not None:
            return
        try:
            now = _read(self._store)
            if now is not None and now.token == self._mine.token:
                self._store.delete(NAME)
        except StorageError:
            return  # the store is gone, and with it the point of giving back

    def __enter__(self) -> "Lease":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def _keep(self) -> None:
        while not self._stop.wait(self._mine.lifetime_s / _BEATS):
            if not self._renew():
                return

    def _renew(self) -> bool:
        """Writes the lease anew; false if it is lost."""
        try:
            if not self._look():
                return False
            self._mine = replace(self._mine, written_s=time.time(), beat=self._mine.beat + 1)
            self._store.write_atomic(NAME, self._mine.to_bytes())
        except StorageError:
            if time.monotonic() - self._renewed > self._mine.lifetime_s:
                self._lose(self._not_renewed())
                return False
            return True  # tried again at the next beat
        self._renewed = time.monotonic()
        return True

    def _look(self) -> bool:
        """Whether the lease is still ours; one that vanished is written again by the next renewal."""
        now = _read(self._store)
        if now is None or now.token == self._mine.token:
            return True
        self._lose(
            RunLocked(
                f"the run folder {self._store.url} was taken over by {now.describe()}",
                url=self._store.url,
                hint="this launcher must have been silent for too long; let the other one go on",
            )
        )
        return False

    def _lose(self, why: RunLocked) -> None:
        if self._lost is None:
            self._lost = why
            if self._on_lost is not None:
                self._on_lost(why)

    def _not_renewed(self) -> RunLocked:
        return RunLocked(
            f"the lease on {self._store.url} could not be renewed for {self._mine.lifetime_s:.0f} s",
            url=self._store.url,
            hint="check the store; launch again to go on from the newest checkpoint",
        )


def _read(store: Store) -> Holder | None:
    try:
        return Holder.from_bytes(store.read(NAME, limit_bytes=_LIMIT_BYTES))
    except ObjectMissing:
        return None


def _refuse_unless_stale(store: Store, found: Holder) -> None:
    if found.is_dead():
        return
    if abs(time.time() - found.written_s) < found.lifetime_s:
        raise _locked(store, found)
    deadline = time.monotonic() + 2.5 * found.lifetime_s / _BEATS
    while time.monotonic() < deadline:
        time.sleep(min(1.0, found.lifetime_s / _BEATS / 4))
        now = _read(store)
        if now is None or now.token != found.token:
            return  # given back, or taken by another: the caller looks again
        if now.beat != found.beat:
            raise _locked(store, now)


def _locked(store: Store, holder: Holder) -> RunLocked:
    return RunLocked(
        f"the run folder {store.url} is in use by {holder.describe()}",
        url=store.url,
        hint=f"stop that launcher or choose another run folder; if it is dead, try again in {holder.lifetime_s:.0f} s",
    )


def _machine() -> str:
    """One boot of one machine and one space of process numbers; empty where it cannot be told (not Linux)."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


def _started(pid: int) -> float | None:
    """When a process began (Unix time); None if there is none with this number that still runs."""
    import psutil

    try:
        process: Any = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else float(process.create_time())
    except psutil.NoSuchProcess:
        return None
