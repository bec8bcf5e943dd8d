"""What saving and loading cost, beside plain reads and writes and beside what others offer.

Run: python -m benchmarks.checkpoint [--mib 1024] [--rounds 5] [--only local|small|s3|fleet|others] [--folder FOLDER]

All contenders of a table take turns within each round; medians over rounds are printed, and the ratio that is aimed
at. Cold: the pages of the files are dropped from the cache before each read.
"""

import argparse
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from rung.launcher.checkpoint.manifest import FileEntry, Manifest, Meta, Part, commit, merge
from rung.launcher.checkpoint.pieces import Pieces
from rung.launcher.storage import Store

MIB = 1 << 20
Times = dict[str, list[float]]
Contenders = dict[str, Callable[[], object]]


def take_turns(
    rounds: int, contenders: dict[str, Callable[[], object]], before: Callable[[], None] | None = None
) -> Times:
    """Seconds of each contender in each round, each time in another order; one warm-up round is not counted."""
    times: Times = {name: [] for name in contenders}
    for number in range(rounds + 1):
        names = list(contenders)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            run = contenders[name]
            if before is not None:
                before()
            began = time.perf_counter()
            said = run()
            seconds = said if isinstance(said, float) else time.perf_counter() - began
            if number:
                times[name].append(seconds)
    return times


def show(title: str, times: Times, nbytes: int, base: str, aims: dict[str, str]) -> None:
    """One line for each contender: median, rate, and speed as a share of the base's."""
    print(f"\n{title}")
    against = statistics.median(times[base])
    for name, seconds in times.items():
        middle = statistics.median(seconds)
        rate = f"{nbytes / middle / 2**30:7.2f} GiB/s" if nbytes else " " * 13
        print(f"  {name:<44} {middle * 1e3:10.1f} ms {rate}   {against / middle:6.2f}   {aims.get(name, '')}")


# ------------------------------------------------------------------------------------------------ a fleet's manifest


def fleet_parts(workers: int, tensors: int, elements: int = 1 << 24) -> list[Part]:
    """What `workers` under ZeRO-3 report: each holds a piece of each tensor, in one file with its block hashes."""
    each = elements // workers
    table = "[" + ",".join(f'["optim.exp_avg/layers.{i}.weight",[{elements}],"F32"]' for i in range(tensors)) + "]"
    size = 65536 + tensors * each * 4
    rng = np.random.default_rng(0)
    parts = []
    for rank in range(workers):
        number = np.arange(tensors)
        parts.append(
            Part(
                step=1,
                rank=rank,
                world=workers,
                attempt="1.abcdef",
                files=(
                    FileEntry(
                        name=f"shard-1.abcdef-{rank}-1.safetensors",
                        size=size,
                        block_bytes=MIB,
                        hashes=rng.bytes(8 * -(-size // MIB)),
                    ),
                ),
                table=str(table[:-1] + "]"),  # a string of its own, as a message brings it
                pieces=Pieces(
                    tensor=number.astype(np.int32),
                    file=np.zeros(tensors, dtype=np.int32),
                    start=np.full(tensors, rank * each, dtype=np.int64),
                    length=np.full(tensors, each, dtype=np.int64),
                    offset=65536 + number.astype(np.int64) * each * 4,
                ),
            )
        )
    return parts


def merge_write_read(parts: list[Part]) -> float:
    """Seconds to merge parts, write the manifest, and read it back."""
    began = time.perf_counter()
    manifest = merge(parts, Meta(step=1))
    data = manifest.to_bytes()
    again = Manifest.from_bytes(data, folder=manifest.folder)
    seconds = time.perf_counter() - began
    assert again.tensors == manifest.tensors
    return seconds


def peak_mib() -> float:
    """The most memory that this process had resident. (getrusage's figure may be that of the process that forked.)"""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def fleet() -> None:
    """Run in a process of its own, so that its memory is its own."""
    parts = fleet_parts(4096, 1000)
    seconds = statistics.median(merge_write_read(parts) for _ in range(5))
    peak = peak_mib()
    size = len(merge(parts, Meta(step=1)).to_bytes())
    print("\nmanifest of 4,096 workers x 1,000 tensors (ZeRO-3, 64 GiB), merged, written and read")
    print(f"  {seconds:.2f} s (aim: < 2), peak {peak:.0f} MiB (aim: < 500), file {size / MIB:.1f} MiB")


# ------------------------------------------------------------------------------------------------ local disk


def make_state(nbytes: int, tensors: int) -> dict[str, Any]:
    """`tensors` equal float32 tensors of `nbytes` in all."""
    import torch

    each = nbytes // 4 // tensors
    return {f"model/layers.{i}.weight": torch.randn(each) for i in range(tensors)}


def intervals_of(state: dict[str, Any]) -> list[Any]:
    from rung.strategies.shards import Interval

    return [Interval(name=n, shape=tuple(t.shape), dtype=t.dtype, start=0, data=t.view(-1)) for n, t in state.items()]


class Local:
    """Our saves and loads of one state below one folder."""

    def __init__(self, folder: Path, state: dict[str, Any]) -> None:
        from rung.launcher.checkpoint.save import Saver

        self.store = Store.open(str(folder))
        self.state, self.intervals = state, intervals_of(state)
        self.parts: list[Part] = []
        self.saver = Saver(self.store, rank=0, world=1, attempt=1, on_part=self.parts.append)
        self.step = 0
        self.manifest: Manifest | None = None

    def save(self) -> None:
        self.step += 1
        self.saver.snapshot(self.step, self.intervals)
        self.saver.wait()
        self.manifest = merge([self.parts.pop()], Meta(step=self.step), last=self.manifest)
        commit(self.store, self.manifest)

    def blocked(self) -> float:
        self.step += 1
        seconds = self.saver.snapshot(self.step, self.intervals).copied_s
        self.saver.wait()
        self.store.delete_folder(f"checkpoints/step-{self.step:09d}")
        return seconds

    def load(self) -> None:
        from rung.launcher.checkpoint.load import Loader

        assert self.manifest is not None
        Loader(self.store, self.manifest).fill(self.intervals)

    def resume(self) -> None:
        """Manifest and all, as a run does that goes on."""
        from rung.launcher.checkpoint.load import Loader

        assert self.manifest is not None
        Loader(self.store, Manifest.read(self.store, self.manifest.folder)).fill(self.intervals)

    @property
    def files(self) -> list[Path]:
        assert self.manifest is not None
        folder = self.store.local_path(self.manifest.folder)
        assert folder is not None
        return [folder / f.name for f in self.manifest.files]

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.state.values())


def raw_read(files: list[Path], target: memoryview, threads: int) -> None:
    """Reads whole files in parallel, 8 MiB at a time, into memory that is there."""
    jobs = []
    at = 0
    for file in files:
        size = file.stat().st_size
        jobs += [(file, start, at + start, min(8 * MIB, size - start)) for start in range(0, size, 8 * MIB)]
        at += size

    def one(job: tuple[Path, int, int, int]) -> None:
        file, start, place, count = job
        descriptor = os.open(file, os.O_RDONLY)
        assert os.preadv(descriptor, [target[place : place + count]], start) == count
        os.close(descriptor)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(one, jobs))


def raw_write(folder: Path, data: memoryview, files: int) -> None:
    """Writes files in parallel, each with fsync."""
    folder.mkdir(parents=True, exist_ok=True)
    each = len(data) // files

    def one(number: int) -> None:
        descriptor = os.open(folder / f"{number}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        part = data[number * each : (number + 1) * each]
        while part:
            part = part[os.write(descriptor, part[: 8 * MIB]) :]
        os.fsync(descriptor)
        os.close(descriptor)

    with ThreadPoolExecutor(files) as pool:
        list(pool.map(one, range(files)))


def drop(files: list[Path]) -> None:
    """Drops the pages of files from the cache."""
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def local(folder: Path, nbytes: int, tensors: int, rounds: int) -> None:
    """Loads warm and cold, saves to durable, and what training is blocked for."""
    import torch

    state = make_state(nbytes, tensors)
    ours = Local(folder / "run", state)
    ours.save()
    what = f"{ours.nbytes / MIB:.0f} MiB in {tensors:,} tensors"
    target = memoryview(bytearray(sum(f.stat().st_size for f in ours.files)))
    threads = ours.store.parallel
    loads: Contenders = {
        "parallel raw read": lambda: raw_read(ours.files, target, threads),
        "rung, verified": ours.load,
        "rung, verified, manifest read and parsed": ours.resume,
    }
    show(
        f"load, warm: {what}",
        take_turns(rounds, loads),
        ours.nbytes,
        "parallel raw read",
        {"rung, verified": "aim >= 0.5"},
    )
    cold = take_turns(rounds, loads, before=lambda: drop(ours.files))
    show(f"load, cold: {what}", cold, ours.nbytes, "parallel raw read", {"rung, verified": "aim >= 0.9"})

    copies = {name: torch.empty_like(t) for name, t in state.items()}

    def plain() -> None:
        for name, tensor in state.items():
            copies[name].copy_(tensor)

    blocked = take_turns(rounds, {"plain copy of each tensor": plain, "rung, blocked": ours.blocked})
    show(f"blocked: {what}", blocked, ours.nbytes, "plain copy of each tensor", {"rung, blocked": "aim >= 0.83"})

    # As many bytes, as random: zeros would come from one page that stays in the processor's cache.
    data = memoryview(torch.cat([t.view(-1) for t in state.values()]).view(torch.uint8).numpy())
    saves: Contenders = {
        "raw write + fsync, 4 files": lambda: raw_write(folder / "raw", data, 4),
        "rung, durable and committed": ours.save,
    }

    def fresh() -> None:
        # Everybody writes new files, with as much just freed: pages that are used again are many times faster.
        ours.store.delete_folder("checkpoints")
        shutil.rmtree(folder / "raw", ignore_errors=True)

    times = take_turns(rounds, saves, before=fresh)
    show(
        f"save: {what}", times, ours.nbytes, "raw write + fsync, 4 files", {"rung, durable and committed": "aim >= 0.9"}
    )
    ours.saver.close()


# ------------------------------------------------------------------------------------------------ others


def synced(path: Path) -> None:
    """Makes a file's content durable."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def remove(*paths: Path) -> None:
    """Deletes files and folders that are there."""
    for path in paths:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def others(folder: Path, nbytes: int, tensors: int, rounds: int) -> None:
    """torch.save, safetensors, torch.distributed.checkpoint and DeepSpeed, each as its documentation has it."""
    import torch
    import torch.distributed.checkpoint as dcp
    from safetensors.torch import load_file, save_file
    from torch.distributed.checkpoint import FileSystemWriter
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

    state = make_state(nbytes, tensors)
    ours = Local(folder / "run", state)
    into = {n: torch.empty_like(t) for n, t in state.items()}
    pt, st, dist = folder / "state.pt", folder / "state.safetensors", folder / "dcp"

    def torch_save() -> None:
        torch.save(state, pt)
        synced(pt)

    def safe_save() -> None:
        save_file(state, st)
        synced(st)

    def dcp_save() -> None:
        dcp.save(state, storage_writer=FileSystemWriter(dist, thread_count=4), no_dist=True)

    def dcp_load() -> None:
        dcp.load(into, storage_reader=FsspecReader(str(dist)), no_dist=True)

    saves: Contenders = {
        "rung": ours.save,
        "torch.save + fsync": torch_save,
        "safetensors + fsync": safe_save,
        "torch.distributed.checkpoint, sync": dcp_save,
    }
    engine = deepspeed_engine(state)
    if engine is not None:
        saves["DeepSpeed save_checkpoint (no fsync)"] = lambda: engine.save_checkpoint(str(folder / "ds"), tag="x")
    what = f"{nbytes / MIB:.0f} MiB in {tensors:,} tensors"

    def fresh() -> None:
        ours.store.delete_folder("checkpoints")
        remove(dist, folder / "ds", pt, st)

    show(f"save: {what}", take_turns(rounds, saves, before=fresh), ours.nbytes, "rung", {})
    dcp_async(folder, state, ours, rounds)
    for save in (ours.save, torch_save, safe_save, dcp_save):
        save()

    def fill(found: dict[str, Any]) -> None:
        for name, tensor in found.items():
            into[name].copy_(tensor)

    loads: Contenders = {
        "rung, verified": ours.load,
        "torch.load + copy": lambda: fill(torch.load(pt, weights_only=True)),
        "safetensors + copy": lambda: fill(load_file(st)),
        "torch.distributed.checkpoint FsspecReader": dcp_load,
    }
    aims = {"torch.distributed.checkpoint FsspecReader": "aim <= 0.2"}
    show(f"load, warm: {what}", take_turns(rounds, loads), ours.nbytes, "rung, verified", aims)
    ours.saver.close()


def dcp_async(folder: Path, state: dict[str, Any], ours: Local, rounds: int) -> None:
    """What blocks training: our snapshot, and the call of async_save."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import FileSystemWriter

    if not dist.is_initialized():
        store = dist.HashStore()
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)

    def asynchronous() -> float:
        began = time.perf_counter()
        done = dcp.async_save(state, storage_writer=FileSystemWriter(folder / "dcp-async", thread_count=4))
        seconds = time.perf_counter() - began
        done.result()
        return seconds

    contenders: Contenders = {
        "rung": ours.blocked,
        "torch.distributed.checkpoint, async": asynchronous,
    }
    show("training blocked by a save", take_turns(rounds, contenders), ours.nbytes, "rung", {})


def deepspeed_engine(state: dict[str, Any]) -> Any:
    """An engine whose weights are the state; None, with the reason printed, where DeepSpeed cannot run."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    try:
        import deepspeed
        import torch
        import torch.distributed as dist

        if not dist.is_initialized():
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        module = torch.nn.ParameterList([torch.nn.Parameter(t) for t in state.values()])
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        return deepspeed.initialize(model=module, optimizer=optimizer, config={"train_batch_size": 1})[0]
    except Exception as error:  # an optional contender: without it the table is shorter, and says so
        print(f"\nDeepSpeed is left out: {error!r}")
        return None


# ------------------------------------------------------------------------------------------------ S3


def s3(nbytes: int, rounds: int) -> None:
    """Against s3fs's own concurrent put and get of the same objects, on a moto server in another process."""
    from rung.launcher.checkpoint.load import Loader
    from rung.launcher.checkpoint.save import Saver

    server = subprocess.Popen(
        [sys.executable, "-c", _MOTO],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        stdin=subprocess.PIPE,
    )
    assert server.stdout is not None
    endpoint = server.stdout.readline().strip()
    try:
        options = {"key": "k", "secret": "benchmark", "endpoint_url": endpoint}
        import s3fs

        plain = s3fs.S3FileSystem(**options, use_listings_cache=False, skip_instance_cache=True)
        plain.call_s3("create_bucket", Bucket="bench")
        store = Store.open("s3://bench/run", options)
        state = make_state(nbytes, 8)
        intervals = intervals_of(state)
        parts: list[Part] = []
        saver = Saver(store, rank=0, world=1, attempt=1, on_part=parts.append)

        def save() -> None:
            saver.snapshot(1, intervals)
            saver.wait()

        save()
        manifest = merge([parts[0]], Meta(step=1))
        objects = {
            f"bench/plain/{f.name}": store.read(f"{manifest.folder}/{f.name}", limit_bytes=1 << 30)
            for f in manifest.files
        }
        plain.pipe(objects)
        title = f"S3, {nbytes / MIB:.0f} MiB in {len(objects)} objects"
        puts = take_turns(rounds, {"s3fs put": lambda: plain.pipe(objects), "rung save": save})
        show(f"{title}: save", puts, nbytes, "s3fs put", {"rung save": "aim >= 0.9"})
        gets = take_turns(rounds, {
            "s3fs get": lambda: plain.cat(list(objects)),
            "rung load, verified": lambda: Loader(store, manifest).fill(intervals),
        })  # fmt: skip
        show(f"{title}: load", gets, nbytes, "s3fs get", {"rung load, verified": "aim >= 0.9"})
        saver.close()
    finally:
        server.kill()
        server.wait(10)


_MOTO = """
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
host, port = server.get_host_and_port()
print(f"http://{host}:{port}", flush=True)
sys.stdin.read()
"""


def main() -> None:
    """Prints one table for each question."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=["local", "small", "others", "s3", "fleet", "fleet-here"])
    parser.add_argument("--folder", type=Path, help="where to write; a temporary folder if not given")
    args = parser.parse_args()
    if args.only == "fleet-here":
        fleet()
        return
    base = Path(tempfile.mkdtemp(prefix="bench-", dir=args.folder))
    try:
        if args.only in (None, "fleet"):
            subprocess.run([sys.executable, "-m", "benchmarks.checkpoint", "--only", "fleet-here"], check=True)
        for name, tensors in (("local", 16), ("small", 100_000)):
            if args.only in (None, name):
                local(base / name, args.mib * MIB, tensors, args.rounds)
                shutil.rmtree(base / name)
        if args.only in (None, "others"):
            others(base / "others", args.mib * MIB, 16, args.rounds)
        if args.only in (None, "s3"):
            s3(min(args.mib, 256) * MIB, args.rounds)
    finally:
        shutil.rmtree(base, ignore_errors=True)


if __name__ == "__main__":
    main()
