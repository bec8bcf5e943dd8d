"""Saving what one worker owns: a copy to host memory while training waits, then a thread that writes and hashes.

The copy goes into one buffer that is used again for each save, laid out as the files will be. One save at a time: the
next `snapshot` waits for the one before, and says for how long. What the thread runs into is never lost: it is given
to `on_failure`, and raised by the next call of the saver.
"""

import itertools
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
import xxhash

from rung.launcher.checkpoint.layout import (
    BLOCK_BYTES,
    Columns,
    FileLayout,
    Group,
    Layout,
    columns_of,
    lay_out,
    signature,
)
from rung.launcher.checkpoint.manifest import FileEntry, Part, folder_of
from rung.launcher.storage import Store
from rung.strategies.errors import RungError, StorageError
from rung.strategies.shards import Interval

WRITERS = 4
REMOTE_WRITERS = 8  # each may hold a copy of what it sends, of up to 96 MiB


def writers(store: Store) -> int:
    """How many threads write a save to this store."""
    return min(REMOTE_WRITERS if store.remote else WRITERS, store.parallel)


Saved = tuple[int, Layout, Mapping[str, Any]]  # step, what lies where in the buffer, meta


@dataclass(frozen=True, kw_only=True, slots=True)
class Blocked:
    """How long a snapshot kept training waiting: for the save before it, and for the copy."""

    waited_s: float
    copied_s: float


class Saver:
    """Saves the intervals of one rank below `store`, the folder of a run. Call order:

    1. `snapshot(step, intervals)` at a step boundary, as often as wanted. `on_part` is called, from the saver's
       thread, when all files of that step are durable; `on_failure` if they cannot be.
    2. `emergency(step, intervals)` instead, from any thread, when the main one may be stuck.
    3. `rewrite(other_store)` after a failure: the same snapshot once more, elsewhere.
    4. `wait()` until the last save is durable, `close()` at the end.

    `attempt` is part of the files' names; they are unique even if two attempts have the same one.
    """

    def __init__(
        self,
        store: Store,
        *,
        rank: int,
        world: int,
        attempt: int | str,
        on_part: Callable[[Part], None],
        on_failure: Callable[[int, RungError], None] | None = None,
    ) -> None:
        self._store = store
        self._rank, self._world = rank, world
        self._attempt = f"{attempt}.{secrets.token_hex(3)}"
        self._on_part, self._on_failure = on_part, on_failure
        self._numbers = itertools.count(1)  # next() on it is safe in several threads
        self._layout: Layout | None = None
        self._columns: Columns | None = None
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._saved: Saved | None = None  # what the buffer holds
        self._thread: threading.Thread | None = None
        self._error: RungError | None = None
        self._last_part: Part | None = None

    def snapshot(self, step: int, intervals: Sequence[Interval], meta: Mapping[str, Any] | None = None) -> Blocked:
        """Copies the intervals and returns; the thread does the rest. `meta` comes back as `Part.meta`.

        Waits first if the save before is still being written. Raises the `RungError` of that save if it failed.
        """
        began = time.perf_counter()
        self.wait()
        waited = time.perf_counter()
        columns = columns_of(intervals)
        if self._layout is None or columns != self._columns:
            self._layout, self._columns = lay_out(signature(columns)), columns
        layout, data = self._layout, [i.data for i in intervals]
        on_cuda = any(map(attrgetter("is_cuda"), data))
        self._reserve(layout.buffer_bytes, pinned=on_cuda)
        self._saved = None
        # Nothing is written meanwhile: the copy is what training waits for, and it has the machine to itself.
        for file in layout.files:
            _fill(self._buffer, file.begin, file, data, gather=True)
        if on_cuda:
            torch.cuda.current_stream().synchronize()
        self._saved = (step, layout, dict(meta or {}))
        thread = threading.Thread(target=self._run, args=(self._saved,), name=f"save-{step}", daemon=True)
        thread.start()  # fails where there is no memory for its stack
        self._thread = thread
        return Blocked(waited_s=waited - began, copied_s=time.perf_counter() - waited)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits until the last save is durable; false if it is not within `timeout_s`. Raises its error, once."""
        if self._thread is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                return False
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error
        return True

    def rewrite(self, store: Store) -> Part:
        """Writes the last snapshot once more, to another store, and returns its part (`on_part` is not called).

        For the one case that the run's own store fails for good. Raises `StorageError` if there is no snapshot.
        """
        if self._thread is not None:
            self._thread.join()
        if self._saved is None:
            raise StorageError("there is no snapshot that could be saved elsewhere")
        step, layout, meta = self._saved
        return self._write(store, step, layout, meta)

    def emergency(
        self,
        step: int,
        intervals: Sequence[Interval],
        meta: Mapping[str, Any] | None = None,
        *,
        timeout_s: float = 60.0,
    ) -> Part:
        """Saves in the calling thread, which need not be the main one, and returns the part (`on_part` is not called).

        Needs no device memory, no collective, and of host memory no more than the largest file. A save that is under
        way is given `timeout_s` to end; its part is the result if it is of the same step.
        """
        running = self._thread
        if running is not None:
            running.join(timeout_s)
        if self._last_part is not None and self._last_part.step == step:
            return self._last_part
        layout, data = lay_out(signature(columns_of(intervals))), [i.data for i in intervals]
        needed = max((f.size for f in layout.files), default=0)
        bounce = torch.empty(needed, dtype=torch.uint8)
        began, entries = time.perf_counter(), []
        # The current stream may wait for a collective that never ends.
        on_cuda = any(map(attrgetter("is_cuda"), data))
        with torch.cuda.stream(torch.cuda.Stream()) if on_cuda else nullcontext():  # type: ignore[no-untyped-call]
            for file in layout.files:
                _fill(bounce, 0, file, data, gather=False)
                if on_cuda:
                    torch.cuda.current_stream().synchronize()
                view = _bytes_of(bounce[: file.size])
                name = self._next_name()
                self._store.write(f"{folder_of(step)}/{name}", view)
                entries.append(_entry(name, view))
        return self._part(step, layout, entries, dict(meta or {}), time.perf_counter() - began)

    def close(self, timeout_s: float = 60.0) -> None:
        """Waits for the save under way, and lets go of the buffer. Never raises: errors went to `on_failure`."""
        if self._thread is not None:
            self._thread.join(timeout_s)
            self._thread = None
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._saved = self._layout = None

    def _reserve(self, needed: int, *, pinned: bool) -> None:
        if self._buffer.numel() < needed or (pinned and not self._buffer.is_pinned()):
            self._buffer = torch.empty(0, dtype=torch.uint8)  # the old one goes before the new one comes
            self._buffer = torch.empty(needed, dtype=torch.uint8, pin_memory=pinned)

    def _run(self, saved: Saved) -> None:
        step, layout, meta = saved
        try:
            part = self._write(self._store, step, layout, meta)
            self._last_part = part
            self._on_part(part)
        except BaseException as error:  # a thread has nobody to raise to: whatever it is, it is handed on
            mine = error if isinstance(error, RungError) else StorageError(f"saving step {step} failed: {error!r}")
            self._error = mine
            if self._on_failure is not None:
                self._on_failure(step, mine)

    def _write(self, store: Store, step: int, layout: Layout, meta: Mapping[str, Any]) -> Part:
        began = time.perf_counter()
        names = [self._next_name() for _ in layout.files]
        folder = folder_of(step)
        store.require_free(sum(f.size for f in layout.files))

        def one(file: FileLayout, name: str) -> FileEntry:
            view = _bytes_of(self._buffer[file.begin : file.begin + file.size])
            store.write(f"{folder}/{name}", view)
            return _entry(name, view)

        try:
            with ThreadPoolExecutor(max_workers=writers(store)) as pool:
                entries = list(pool.map(one, layout.files, names))
        except BaseException:
            self._forget(store, [f"{folder}/{name}" for name in names])
            raise
        return self._part(step, layout, entries, meta, time.perf_counter() - began)

    def _forget(self, store: Store, paths: list[str]) -> None:
        """Deletes what a failed save left, so that a full disk is not filled further; the next sweep gets the rest."""
        try:
            for path in paths:
                store.delete(path)
        except RungError:
            return  # the failure that brought us here is the one to report

    def _part(
        self, step: int, layout: Layout, entries: list[FileEntry], meta: Mapping[str, Any], seconds: float
    ) -> Part:
        return Part(
            step=step,
            rank=self._rank,
            world=self._world,
            attempt=self._attempt,
            files=tuple(entries),
            table=layout.table,
            pieces=layout.pieces,
            meta=meta,
            seconds=seconds,
        )

    def _next_name(self) -> str:
        return f"shard-{self._attempt}-{self._rank}-{next(self._numbers)}.safetensors"


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return tensor.numpy().data


def _entry(name: str, view: memoryview) -> FileEntry:
    digests = [xxhash.xxh3_64_digest(view[at : at + BLOCK_BYTES]) for at in range(0, len(view), BLOCK_BYTES)]
    return FileEntry(name=name, size=len(view), block_bytes=BLOCK_BYTES, hashes=b"".join(digests))


def _fill(buffer: torch.Tensor, at: int, file: FileLayout, data: Sequence[torch.Tensor], *, gather: bool) -> None:
    """Brings one file, header and data, into `buffer` from byte `at` on. `gather` allows a little device memory."""
    buffer[at : at + len(file.header)] = torch.frombuffer(bytearray(file.header), dtype=torch.uint8)
    shift = at - file.begin
    for group in file.groups:
        target = buffer[group.begin + shift : group.begin + shift + group.nbytes].view(group.dtype)
        _copy(target, group, data, gather=gather)


def _copy(target: torch.Tensor, group: Group, data: Sequence[torch.Tensor], *, gather: bool) -> None:
    if group.whole:
        sources = [data[i] for i, _, _ in group.items]
    else:
        sources = [data[i][first : first + count] for i, first, count in group.items]
    if len(sources) > 1 and set(map(attrgetter("dtype"), sources)) == {group.dtype}:
        # One call for many small tensors: a tenth of the time of a copy each.
        if all(map(attrgetter("is_cpu"), sources)):
            with torch.no_grad():
                torch.cat(sources, out=target)
            return
        if gather and len(set(map(attrgetter("device"), sources))) == 1:
            try:
                target.copy_(torch.cat([s.detach() for s in sources]), non_blocking=True)
            except torch.cuda.OutOfMemoryError:
                pass  # then one by one, below
            else:
                return
    start = 0
    for source in sources:
        run = target[start : start + source.numel()]
        if source.dtype != group.dtype:
            run.copy_(source.detach().cpu())
        else:
            run.copy_(source.detach(), non_blocking=source.is_cuda)
        start += source.numel()
