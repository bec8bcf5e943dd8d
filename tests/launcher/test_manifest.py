"""The manifest: many writers merged, full cover or a named gap, and a size that suits thousands of workers."""

import itertools
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rung.launcher.checkpoint.manifest import FileEntry, Manifest, Meta, Part, commit, merge
from rung.launcher.checkpoint.pieces import Pieces
from rung.launcher.storage import Store
from rung.strategies.errors import StorageError


def part(rank: int, world: int, rows: list[tuple[int, int, int, int]], table: str, step: int = 5) -> Part:
    """rows: (tensor, start, length, offset), all in one file."""
    columns = np.array(rows, dtype=np.int64).reshape(-1, 4).T
    size = 1 << 20
    return Part(
        step=step, rank=rank, world=world, attempt="1",
        files=(FileEntry(name=f"shard-1-{rank}-1.safetensors", size=size, block_bytes=1 << 20, hashes=bytes(8)),),
        table=table,
        pieces=Pieces(tensor=columns[0].astype(np.int32), file=np.zeros(len(rows), dtype=np.int32),
                      start=columns[1].copy(), length=columns[2].copy(), offset=columns[3].copy()),
    )  # fmt: skip


TABLE = '[["model/a",[10,10],"F32"],["model/b",[7],"BF16"],["model/none",[0,3],"F32"]]'


def whole(world: int = 4) -> list[Part]:
    parts = []
    for rank in range(world):
        rows = [(0, 100 * rank // world, 100 * (rank + 1) // world - 100 * rank // world, 64)]
        if rank == 1:
            rows.append((1, 0, 7, 4096))
        parts.append(part(rank, world, rows, TABLE))
    return parts


def test_equal_pieces_of_many_workers_become_one_run():
    manifest = merge(list(reversed(whole())), Meta(step=5, aliases={"model/tied": "model/a"}, trainer={"x": [1.5]}))
    assert manifest.tensors.runs_of("model/a").tolist() == [[0, 25, 4, 0, 1, 64]]
    assert manifest.tensors.runs_of("model/b").tolist() == [[0, 7, 1, 1, 0, 4096]]
    assert manifest.tensors.runs_of("model/none").tolist() == []
    assert manifest.resolve("model/tied") == "model/a"
    again = Manifest.from_bytes(manifest.to_bytes(), folder=manifest.folder)
    assert again == manifest
    assert again.trainer == {"x": [1.5]}


def test_workers_with_other_tensors_are_merged_by_name():
    parts = [
        part(0, 2, [(0, 0, 4, 64)], '[["model/x",[4],"F32"]]'),
        part(1, 2, [(1, 3, 2, 64), (0, 0, 9, 128), (1, 0, 3, 512)], '[["model/y",[9],"F32"],["model/z",[5],"F32"]]'),
    ]
    manifest = merge(parts, Meta(step=5))
    assert manifest.tensors.names == ("model/x", "model/y", "model/z")
    assert manifest.tensors.runs_of("model/z")[:, :2].tolist() == [[0, 3], [3, 2]]


def instead(rank: int, *rows: tuple[int, int, int, int]) -> list[Part]:
    """The whole, but for one rank that wrote something else."""
    parts = whole()
    parts[rank] = part(rank, 4, list(rows), TABLE)
    return parts


def shaped_otherwise() -> list[Part]:
    return [*whole()[:3], replace(whole()[3], table=TABLE.replace("[10,10]", "[100]"))]


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (whole()[:3], r"\[3\] did not save"),
        ([*whole(), whole()[0]], "saved twice"),
        ([*whole()[:3], replace(whole()[3], step=6)], "saved step 6"),
        (instead(2, (0, 50, 24, 64)), "model/a: nobody wrote elements 74 to 75"),
        (instead(2, (0, 49, 26, 64)), "model/a: two workers wrote elements 49 to 50"),
        (instead(1, (0, 25, 25, 64)), "model/b: nobody wrote any of its 7"),
        (instead(3, (0, 75, 24, 64)), "model/a: its pieces end at element 99, it has 100"),
        (instead(3, (0, 75, 26, 64)), "model/a: its pieces end at element 101"),
        (shaped_otherwise(), "rank 3 holds model/a as"),
    ],
)
def test_parts_that_are_not_the_whole_are_refused_by_name(parts, message):
    with pytest.raises(StorageError, match=message):
        merge(parts, Meta(step=5))


def test_random_cuts_are_merged_and_read_back_alike():
    rng = np.random.default_rng(0)
    for _ in range(50):
        world, count = int(rng.integers(1, 6)), int(rng.integers(1, 5))
        sizes = rng.integers(0, 30, count)
        table = "[" + ",".join(f'["model/{i}",[{n}],"F32"]' for i, n in enumerate(sizes)) + "]"
        rows: list[list[tuple[int, int, int, int]]] = [[] for _ in range(world)]
        truth = {}
        for i, size in enumerate(sizes):
            edges = sorted({0, int(size), *(int(x) for x in rng.integers(0, size + 1, 3))})
            for low, high in itertools.pairwise(edges):
                rank = int(rng.integers(world))
                offset = 64 + 4 * int(rng.integers(100))
                rows[rank].append((i, low, high - low, offset))
                truth[i, low] = (high - low, rank, offset)
        for each in rows:
            rng.shuffle(each)
        manifest = merge([part(r, world, rows[r], table) for r in range(world)], Meta(step=5))
        manifest = Manifest.from_bytes(manifest.to_bytes(), folder="x")
        found = {}
        for i in range(count):
            for start, length, n, file, step, offset in manifest.tensors.runs_of(f"model/{i}").tolist():
                for k in range(n):
                    found[i, start + k * length] = (length, file + k * step, offset)
        assert found == truth


def test_a_commit_sees_the_files_first(tmp_path):
    store = Store.open(str(tmp_path))
    manifest = merge(whole(), Meta(step=5))
    with pytest.raises(StorageError, match=r"shard-1-0-1.safetensors is missing"):
        commit(store, manifest)
    assert not store.exists(f"{manifest.folder}/manifest.json")
    for file in manifest.files:
        store.write(f"{manifest.folder}/{file.name}", bytes(file.size))
    store.write(f"{manifest.folder}/{manifest.files[2].name}", bytes(10))
    with pytest.raises(StorageError, match=r"shard-1-2-1.safetensors has 10 bytes"):
        commit(store, manifest)
    store.write(f"{manifest.folder}/{manifest.files[2].name}", bytes(1 << 20))
    assert commit(store, manifest) == "checkpoints/step-000000005"
    assert Manifest.read(store, manifest.folder) == manifest


@pytest.mark.slow
def test_4096_workers_and_1000_tensors_are_merged_within_two_seconds_and_500_mb():
    code = (
        "from benchmarks.checkpoint import fleet_parts, merge_write_read, peak_mib\n"
        "parts = fleet_parts(4096, 1000)\n"
        "seconds = min(merge_write_read(parts) for _ in range(5))\n"
        "print(seconds, peak_mib())\n"
    )
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, check=True, timeout=100, capture_output=True, text=True, cwd=root)
    seconds, peak_mib = map(float, done.stdout.split())
    assert seconds < 2.0
    assert peak_mib < 500.0
