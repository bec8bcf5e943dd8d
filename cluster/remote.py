"""Workers on several machines, as the launcher sees them: the interface of `rung.cluster.local.Workers`, over TCP.

One agent (`rung.cluster.agent`) runs on each machine. Something else starts the agents (`rung.cluster.ray_train` has a
Ray cluster do it); here they are listened to. One thread does all the talking, so that sending never blocks. A machine
is lost when its connection ends, or when it has said nothing for `SILENT_S`; its ranks then count as ended.
"""

import contextlib
import hmac
import pickle
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import TracebackType

from rung.cluster.agent import (
    NUMBER,
    TOKEN_BYTES,
    AskStacks,
    Duty,
    End,
    Kill,
    Listening,
    Log,
    Meet,
    Met,
    Ping,
    Port,
    Pulse,
    Send,
    Settled,
    Stacks,
    Started,
)
from rung.cluster.failures import Ended, Facts, Failure
from rung.cluster.link import USER, frame
from rung.cluster.local import KILL_S, TERM_S, Event, Message
from rung.cluster.sites import Line, Memory, Site, neighbours
from rung.cluster.verdict import Verdict, tail, verdict
from rung.strategies.errors import WorkersFailed
from rung.strategies.plan import DeviceType

#: How long an agent may say nothing (it speaks twice a second) before its machine counts as lost.
SILENT_S = 30.0
PING_S = 2.0


class RemoteWorkers:
    """A group of workers on several machines. `launch(number, where, duty)` starts an agent there and returns at once;
    `check()` raises if one could not be started; `reap()` ends all agents, by force if need be."""

    def __init__(
        self, entry: str, sites: Sequence[Site], *, host: str, token: bytes, folder: str, preload: Sequence[str],
        launch: Callable[[int, tuple[str, int], Duty], None], deadline_s: float,
        check: Callable[[], None] = lambda: None, reap: Callable[[], None] = lambda: None,
        why_lost: Callable[[int], str] = lambda _: "",
    ) -> None:  # fmt: skip
        if len(token) != TOKEN_BYTES:
            raise ValueError(f"the token has {TOKEN_BYTES} bytes, got {len(token)}")
        self.specs = tuple(sorted((spec for site in sites for spec in site.specs), key=lambda spec: spec.rank))
        self.world = len(self.specs)
        if [spec.rank for spec in self.specs] != list(range(self.world)):
            raise ValueError(f"ranks have to be 0..{self.world - 1}, got {[spec.rank for spec in self.specs]}")
        self.ends: list[Ended] = []
        self._lines = [Line(number, site) for number, site in enumerate(sites)]
        self.memory = Memory(self._lines)
        self._line_of = {rank: line for line in self._lines for rank in line.ranks}
        self._token, self._check, self._reap, self._why_lost = token, check, reap, why_lost
        self._events: deque[Event] = deque()
        self._answers: dict[int, str] = {}
        self._asked = 0
        self._error: Exception | None = None
        self._changed = threading.Condition()
        self._calls: deque[Callable[[], None]] = deque()
        self._stop_at: float | None = None
        self._closed = False
        for spec in self.specs:
            spec.log.parent.mkdir(parents=True, exist_ok=True)
            spec.log.touch()
        self._listener = socket.create_server((host, 0), backlog=max(16, len(sites)))
        self._wake_r, self._wake_w = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        for end in (self._listener, self._wake_r, self._wake_w):
            end.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._wake_r, selectors.EVENT_READ, lambda _: self._awake())
        self._running = True
        self._thread = threading.Thread(target=self._talk, name="rung-agents", daemon=True)
        self._thread.start()
        try:
            for line in self._lines:
                duty = Duty(
                    entry=entry, specs=line.site.specs, world=self.world, host=line.site.host, folder=folder,
                    preload=tuple(preload), deadline_s=deadline_s,
                )  # fmt: skip
                launch(line.number, self._listener.getsockname()[:2], duty)
            self._wait_for_start(deadline_s)
        except BaseException:
            self.stop(0.0)
            raise

    def _wait_for_start(self, deadline_s: float) -> None:
        until = time.monotonic() + deadline_s
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._error or not self._late(), 0.5)
                if self._error is not None:
                    raise self._error
                if not self._late():
                    return
            self._check()
            if time.monotonic() > until:
                names = ", ".join(f"{line.site.name} (ranks {_span(line.ranks)})" for line in self._late())
                raise WorkersFailed(
                    f"no workers within {deadline_s:g} s on {names}",
                    hint="see `ray status`: the nodes may be busy, or a runtime_env takes long to set up",
                )

    def _late(self) -> list[Line]:
        """Those that have not started their workers, or not tried whether they reach the others, and still can."""
        lost = any(line.over for line in self._lines)
        return [line for line in self._lines if not line.over and not (line.started and (line.met or lost))]

    @property
    def alive(self) -> tuple[int, ...]:
        """Ranks that have not ended."""
        with self._changed:
            ended = {end.rank for end in self.ends}
        return tuple(rank for rank in range(self.world) if rank not in ended)

    def pids(self) -> dict[int, int]:
        """Process of each living rank, on its own machine, as of the last half second."""
        alive = set(self.alive)
        return {r: p for line in self._lines if line.pulse for r, p in line.pulse.pids.items() if r in alive}

    def site_of(self, rank: int) -> str:
        """The name of the machine that a rank runs on."""
        return self._line_of[rank].site.name

    def poll(self, timeout_s: float = 0.0) -> list[Event]:
        """What has happened since the last call, in order; waits up to `timeout_s` for the first event."""
        with self._changed:
            self._changed.wait_for(lambda: self._events, timeout_s)
            events = list(self._events)
            self._events.clear()
        return events

    def send(self, rank: int | None, value: object) -> None:
        """Sends `value` to one rank, or to all that live (None). Never blocks."""
        lines = self._lines if rank is None else [self._line_of[rank]]
        for line in lines:
            self._post(line, Send(rank=rank, value=value))

    def heartbeats(self) -> dict[int, tuple[int, str, float]]:
        """(step, phase, age in seconds) of the last heartbeat of each living rank that has made one."""
        alive, now = set(self.alive), time.monotonic()
        return {
            rank: (step, phase, age + now - line.heard)
            for line in self._lines if line.pulse is not None
            for rank, (step, phase, age) in line.pulse.beats.items() if rank in alive
        }  # fmt: skip

    def stacks(self, rank: int, deadline_s: float = 2.0) -> str:
        """Python stacks of all threads of a living worker; works while it hangs in C code."""
        with self._changed:
            self._asked += 1
            number = self._asked
        self._post(self._line_of[rank], AskStacks(number=number, rank=rank, deadline_s=deadline_s))
        with self._changed:
            if self._changed.wait_for(lambda: number in self._answers, deadline_s + 3.0):
                return self._answers.pop(number)
        return f"{self.site_of(rank)} did not answer within {deadline_s + 3.0:g} s"

    def signal(self, rank: int, number: int) -> None:
        """Sends a signal to one worker."""
        self._post(self._line_of[rank], Kill(rank=rank, signal=int(number)))

    def stop(self, grace_s: float = 10.0, *, reason: str = "") -> None:
        """Ends all workers, then the agents; returns when nothing is left on machines that can be reached."""
        if self._closed:
            return
        self._closed = True
        with self._changed:
            self._stop_at = time.time()
        for line in self._lines:
            self._post(line, End(grace_s=grace_s, reason=reason))
        with self._changed:
            reached = [line for line in self._lines if line.sock is not None]
            self._changed.wait_for(lambda: all(line.over for line in reached), grace_s + TERM_S + KILL_S + 10.0)
        try:
            self._reap()
        finally:
            self._running = False
            self._wake()
            self._thread.join(5.0)

    def verdict(self, *, device: DeviceType = "cpu", hung: Mapping[int, str] | None = None) -> Verdict | None:
        """One screen about why the workers ended; None if all ended well. `hung` are stacks of ranks that hung."""
        kills = [line.pulse.oom_kills for line in self._lines if line.pulse and line.pulse.oom_kills is not None]
        facts = Facts(
            device=device,
            oom_kills=sum(kills) if kills else None,
            log_tails={spec.rank: tail(spec.log) for spec in self.specs},
            hung=dict(hung or {}),
            capped=any(spec.memory_cap_bytes is not None for spec in self.specs),
        )
        with self._changed:
            ends = list(self.ends)
        said = verdict(ends, facts)
        if said is None:
            return None
        line = self._line_of[said.first.rank]
        said = verdict(ends, facts, memory=tuple(line.samples)) or said
        if len(self._lines) > 1:
            where = f"  on {line.site.name}"
            said = replace(said, text="\n".join([said.text.splitlines()[0], where, *said.text.splitlines()[1:]]))
        return said

    def __enter__(self) -> "RemoteWorkers":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop(10.0 if kind is None else 0.0)

    # ---------------------------------------------------------------- the talking thread

    def _post(self, line: Line, value: object) -> None:
        data = frame(USER, value)
        self._calls.append(lambda: self._queue(line, data))
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # full: it will wake anyway; closed: nobody is left to tell
            self._wake_w.send(b"x")

    def _awake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wake_r.recv(4096)

    def _talk(self) -> None:
        next_look = time.monotonic() + PING_S
        ping = frame(USER, Ping())
        while self._running:
            for key, mask in self._selector.select(0.5):
                key.data(mask)
            while self._calls:
                self._calls.popleft()()
            now = time.monotonic()
            if now >= next_look:
                next_look = now + PING_S
                for line in self._lines:
                    if line.sock is not None:
                        self._queue(line, ping)
                        if now - line.heard > SILENT_S:
                            self._lose(line, f"has said nothing for {SILENT_S:g} s")
        self._selector.close()
        for end in (self._listener, self._wake_r, self._wake_w, *(line.sock for line in self._lines)):
            if end is not None:
                end.close()

    def _accept(self, _mask: int) -> None:
        with contextlib.suppress(OSError):
            sock, _ = self._listener.accept()
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            greeting = bytearray()
            self._selector.register(sock, selectors.EVENT_READ, lambda _: self._greeted(sock, greeting))

    def _greeted(self, sock: socket.socket, greeting: bytearray) -> None:
        """Nothing is unpickled from whoever does not know the token."""
        wanted = TOKEN_BYTES + NUMBER.size
        try:
            data = sock.recv(wanted - len(greeting))
        except BlockingIOError:
            return
        except OSError:
            data = b""
        greeting += data
        if data and len(greeting) < wanted:
            return
        self._selector.unregister(sock)
        known = len(greeting) == wanted and hmac.compare_digest(bytes(greeting[:TOKEN_BYTES]), self._token)
        number = NUMBER.unpack_from(greeting, TOKEN_BYTES)[0] if known else -1
        if not 0 <= number < len(self._lines) or self._lines[number].sock is not None:
            sock.close()
            return
        line = self._lines[number]
        line.sock, line.heard = sock, time.monotonic()
        self._selector.register(sock, selectors.EVENT_READ, lambda mask: self._ready(line, mask))
        for waiting in line.waiting:
            self._queue(line, waiting)
        line.waiting.clear()

    def _ready(self, line: Line, mask: int) -> None:
        if mask & selectors.EVENT_READ:
            self._read(line)
        if mask & selectors.EVENT_WRITE:
            self._flush(line)

    def _read(self, line: Line) -> None:
        assert line.sock is not None
        try:
            data = line.sock.recv(1 << 18)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._lose(line, "ended its connection")
            return
        line.heard = time.monotonic()
        for _, body in line.frames.feed(data):
            self._got(line, pickle.loads(body))  # noqa: S301 - its sender knows the token

    def _got(self, line: Line, value: object) -> None:
        with self._changed:
            match value:
                case Message():
                    self._events.append(value)
                case Ended():
                    self._end(value)
                case Started() | Listening() | Met():
                    self._begun(line, value)
                case Pulse():
                    line.pulse = value
                    if value.sample is not None and (not line.samples or line.samples[-1].at != value.sample.at):
                        line.samples.append(value.sample)
                case Log(rank=rank, text=text):
                    with self.specs[rank].log.open("ab") as file:
                        file.write(text)
                case Port():
                    for other in self._lines:
                        if other is not line:
                            self._queue(other, frame(USER, value))
                case Stacks(number=number, text=text):
                    self._answers[number] = text
                case Settled():
                    line.over = True
            self._changed.notify_all()

    def _begun(self, line: Line, value: Started | Listening | Met) -> None:
        match value:
            case Started(error=error):
                line.started = True
                self._error = self._error or error
                line.over = error is not None
            case Listening(port=port):
                line.door = port
                if all(other.door for other in self._lines):
                    for other in self._lines:
                        self._queue(other, frame(USER, Meet(peers=neighbours(self._lines, other))))
            case Met(trouble=trouble):
                line.met = True
                if trouble:
                    self._error = self._error or WorkersFailed(
                        f"{line.site.name} cannot reach {trouble}",
                        hint="the nodes of a cluster have to reach each other on any TCP port: look at firewalls, "
                        "and at `ray start --node-ip-address` where a machine has several networks",
                    )

    def _end(self, ended: Ended) -> None:
        if all(end.rank != ended.rank for end in self.ends):
            ended = replace(ended, log=self.specs[ended.rank].log)
            self.ends.append(ended)
            self._events.append(ended)

    def _lose(self, line: Line, how: str) -> None:
        """A machine is gone, and its workers with it."""
        assert line.sock is not None
        with contextlib.suppress(KeyError):
            self._selector.unregister(line.sock)
        line.sock.close()
        line.sock = None
        with self._changed:
            over, line.over = line.over, True
            if not over:
                at = time.time()
                why = self._why_lost(line.number)
                text = f"{line.site.name} {how}" + (f": {why}" if why else "")
                error = WorkersFailed(text, hint="the machine, its Ray node or the network to it went away")
                for rank in line.ranks:
                    failure = Failure(
                        rank=rank, at=at, type_name="NodeLost", message=text, traceback="", error=error,
                    )  # fmt: skip
                    stopped = self._stop_at is not None
                    self._end(Ended(rank=rank, exit_code=1, signal=None, at=at, failure=failure, stopped=stopped))
            self._changed.notify_all()

    def _queue(self, line: Line, data: bytes) -> None:
        if line.sock is not None:
            line.outbox += data
            self._flush(line)
        elif not line.over:
            line.waiting.append(data)

    def _flush(self, line: Line) -> None:
        if line.sock is None:
            return
        with contextlib.suppress(BlockingIOError, OSError):  # full: later; closed: the next read says so
            while line.outbox:
                del line.outbox[: line.sock.send(line.outbox)]
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if line.outbox else 0)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.modify(line.sock, wanted, lambda mask: self._ready(line, mask))


def _span(ranks: Sequence[int]) -> str:
    return str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]}-{ranks[-1]}"
