"""Check of the store that the run folder is in: write, read, delete, and how fast."""

import contextlib
import secrets
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rung.strategies.errors import DependencyError, RungError
from rung.strategies.findings import Finding, Level

_PROBE_BYTES = 16 << 20
_SLOW_BYTES_PER_S = 20e6  # a checkpoint of 10 GB would take more than eight minutes


def check_store(url: str, options: Mapping[str, Any], deadline: float) -> Iterator[Finding]:
    """Writes one object of 16 MiB, reads it back, deletes it. `deadline`: of `time.monotonic`."""
    from rung.launcher.storage import Store

    patience_s = max(1.0, (deadline - time.monotonic()) / 3)
    missing: list[Path] = []
    try:
        store = Store.open(url, options, patience_s=patience_s)
        if not store.remote:
            folder = Path(url.partition("://")[2] if "://" in url else url).expanduser().absolute()
            missing = [path for path in (folder, *folder.parents) if not path.exists()]
        name = f".probe-{secrets.token_hex(8)}"
        data = memoryview(secrets.token_bytes(1 << 20) * (_PROBE_BYTES >> 20))
        start = time.perf_counter()
        try:
            store.write(name, data)
            written = time.perf_counter()
            back = bytearray(_PROBE_BYTES)
            store.read_into(name, 0, [memoryview(back)])
            read = time.perf_counter()
        finally:
            store.delete(name)
    except RungError as error:
        yield Finding(
            level=Level.ERROR,
            subject="packages.store" if isinstance(error, DependencyError) else "store",
            fact=error.message,
            why="the run folder and its checkpoints could not be written",
            fix=error.hint or "set run: to a place that can be written",
        )
        return
    finally:
        with contextlib.suppress(OSError):  # not made, or in use by now
            for path in missing:  # the run folder did not exist, and a check should leave nothing
                path.rmdir()
    if back != data:
        yield Finding(
            level=Level.ERROR,
            subject="store",
            fact=f"{store.url}: other bytes were read back than were written",
            why="no checkpoint there could be trusted",
            fix="check the disk or the store",
        )
        return
    out, into = _PROBE_BYTES / (written - start), _PROBE_BYTES / (read - written)
    slow = min(out, into) < _SLOW_BYTES_PER_S
    yield Finding(
        level=Level.WARNING if slow else Level.OK,
        subject="store",
        fact=f"{store.url}: written at {out / 1e6:.0f} MB/s, read at {into / 1e6:.0f} MB/s",
        why="saving and resuming take long" if slow else "",
        fix="a nearer store, or checkpoint less often" if slow else "",
    )
