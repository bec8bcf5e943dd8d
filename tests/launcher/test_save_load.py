"""Saving and loading: any cut to any other, verified, and no damage goes unseen."""

import random
import shutil
import subprocess
import sys
import threading
import time

import pytest
import torch
from safetensors.torch import load, load_file

from rung.launcher.checkpoint.find import find, newest_valid
from rung.launcher.checkpoint.inspect import choose, export, show, verify
from rung.launcher.checkpoint.layout import BLOCK_BYTES
from rung.launcher.checkpoint.load import Loader
from rung.launcher.checkpoint.manifest import Manifest, Meta, commit, folder_of, merge
from rung.launcher.checkpoint.save import Saver
from rung.launcher.storage import Store
from rung.strategies.errors import CheckpointDamaged, RungError, StorageError
from rung.strategies.shards import Interval
from tests.launcher.checkpoints import blank, differs, owned, parts_of, save, state


@pytest.fixture
def store(tmp_path):
    return Store.open(str(tmp_path / "run"))


@pytest.mark.parametrize("url", ["disk", "memory://save-load"])
def test_any_number_of_writers_loads_into_any_number_of_readers(url, tmp_path):
    store = Store.open(str(tmp_path) if url == "disk" else f"{url}/{tmp_path.name}")
    tensors = state()
    for writers in (1, 2, 3, 7):
        manifest = save(store, writers, tensors, writers)
        assert manifest.tensors.total_bytes == sum(t.numel() * t.element_size() for t in tensors.values())
        found, rejected = newest_valid(store)
        assert found == manifest
        assert not rejected
        for readers in (1, 2, 5):
            assert differs(store, found, tensors, readers) == []
    assert [info.step for info in find(store)] == [7, 3, 2, 1]


def test_shards_are_plain_safetensors(store):
    tensors = state()
    manifest = save(store, 1, tensors, 2)
    names: dict[str, int] = {}
    for file in manifest.files:
        for name, piece in load_file(store.local_path(manifest.folder) / file.name).items():
            assert piece.ndim == 1
            names[name] = names.get(name, 0) + piece.numel()
    assert names == {n: t.numel() for n, t in tensors.items() if t.numel()}


def test_a_wanted_run_may_lie_anywhere(store):
    tensors = {"model/w": torch.arange(3_000_000, dtype=torch.float32).view(1000, 3000)}
    manifest = save(store, 1, tensors, 3)
    rng = random.Random(0)
    for _ in range(40):
        start = rng.randrange(3_000_000)
        count = rng.choice([1, 2, 100, 20_000, 500_000])
        data = torch.zeros(min(count, 3_000_000 - start))
        Loader(store, manifest).fill(
            [Interval(name="model/w", shape=(1000, 3000), dtype=torch.float32, start=start, data=data)]
        )
        assert torch.equal(data, torch.arange(start, start + len(data), dtype=torch.float32))


def test_only_the_blocks_that_are_needed_are_read(store):
    tensors = {"model/w": torch.randn(8 * BLOCK_BYTES)}
    manifest = save(store, 1, tensors)
    damaged = store.local_path(manifest.folder) / manifest.files[0].name
    with damaged.open("r+b") as file:
        file.seek(5 * BLOCK_BYTES)
        file.write(b"\xff" * 8)
    data = torch.zeros(1000)
    near = Interval(name="model/w", shape=(8 * BLOCK_BYTES,), dtype=torch.float32, start=0, data=data)
    Loader(store, manifest).fill([near])
    assert torch.equal(data, tensors["model/w"][:1000])
    with pytest.raises(CheckpointDamaged, match=r"block 5 \(bytes 5,242,880 to 6,291,456\) has hash \w+, expected \w+"):
        Loader(store, manifest).full_tensor("model/w")


def test_aliases_types_and_strides_of_the_destination(store):
    tensors = state()
    manifest = save(store, 1, tensors, 2, aliases={"model/tied": "model/large"})
    large = tensors["model/large"]
    assert torch.equal(Loader(store, manifest).full_tensor("model/tied"), large)
    wide, half = torch.zeros(large.numel(), dtype=torch.float64), torch.zeros(large.numel(), dtype=torch.bfloat16)
    strided = torch.zeros(large.numel(), 2)[:, 0]
    tied = torch.zeros(large.numel())
    parameter = torch.nn.Parameter(torch.zeros(large.numel()))
    wanted = [
        Interval(name=name, shape=tuple(large.shape), dtype=torch.float32, start=0, data=data)
        for name, data in [
            ("model/large", wide), ("model/large", half), ("model/large", strided), ("model/tied", tied),
            ("model/large", parameter),
        ]
    ]  # fmt: skip
    report = Loader(store, manifest).fill(wanted)
    flat = large.reshape(-1)
    assert torch.equal(wide, flat.double())
    assert torch.equal(half, flat.bfloat16())
    assert torch.equal(strided, flat)
    assert torch.equal(tied, flat)
    assert torch.equal(parameter.data, flat)
    assert not report.missing
    assert "model/half" in report.unexpected


def test_what_does_not_fit_the_model_is_refused_before_reading(store):
    manifest = save(store, 1, state())

    def one(name: str, shape: tuple[int, ...]) -> list[Interval]:
        return [Interval(name=name, shape=shape, dtype=torch.float32, start=0, data=torch.ones(3))]

    with pytest.raises(StorageError, match="names are not in it: model/other"):
        Loader(store, manifest).fill(one("model/other", (3,)))
    assert Loader(store, manifest).fill(one("model/other", (3,)), allow_missing=True).missing == ("model/other",)
    with pytest.raises(StorageError, match=r"model/large is \[3\], in the checkpoint \[3000, 100\]"):
        Loader(store, manifest).fill(one("model/large", (3,)))


def test_a_snapshot_is_of_its_moment_and_its_buffer_is_used_again(store):
    weights = torch.zeros(500_000)
    parts = []
    saver = Saver(store, rank=0, world=1, attempt=1, on_part=parts.append)
    where = set()
    for step in range(1, 6):
        weights.fill_(step)
        saver.snapshot(step, owned({"model/w": weights}, 0, 1), {"epoch": step})
        weights.fill_(-1)
        where.add(saver._buffer.data_ptr())
    saver.wait()
    saver.close()
    assert len(where) == 1
    for part in parts:
        manifest = merge([part], Meta(step=part.step))
        assert part.meta == {"epoch": part.step}
        commit(store, manifest)
        assert Loader(store, manifest).full_tensor("model/w").unique().tolist() == [part.step]


def test_one_save_at_a_time_and_the_wait_is_told(store):
    slow = threading.Event()
    parts = []

    def on_part(part):
        slow.wait(10)
        parts.append(part.step)

    saver = Saver(store, rank=0, world=1, attempt=1, on_part=on_part)
    saver.snapshot(1, owned(state(), 0, 1))
    assert not saver.wait(0.05)
    threading.Timer(0.3, slow.set).start()
    blocked = saver.snapshot(2, owned(state(), 0, 1))
    assert blocked.waited_s > 0.1
    assert parts == [1]
    saver.wait()
    assert parts == [1, 2]


def test_a_failure_of_the_thread_is_handed_on_and_raised_and_the_snapshot_can_go_elsewhere(store, tmp_path):
    root = store.local_path()
    root.parent.mkdir(exist_ok=True)
    root.write_text("a file where the run's folder should be")
    failures: list[tuple[int, RungError]] = []
    saver = Saver(
        store, rank=0, world=1, attempt=1, on_part=lambda p: None, on_failure=lambda s, e: failures.append((s, e))
    )
    tensors = state(3)
    saver.snapshot(9, owned(tensors, 0, 1))
    with pytest.raises(StorageError, match="step-000000009"):
        saver.wait()
    assert [step for step, _ in failures] == [9]
    elsewhere = Store.open(str(tmp_path / "elsewhere"))
    manifest = merge([saver.rewrite(elsewhere)], Meta(step=9))
    commit(elsewhere, manifest)
    assert differs(elsewhere, manifest, tensors) == []
    saver.close()


def test_an_error_of_the_callback_is_not_lost(store):
    def on_part(part):
        raise KeyError("broken link")

    saver = Saver(store, rank=0, world=1, attempt=1, on_part=on_part)
    saver.snapshot(1, owned(state(), 0, 1))
    with pytest.raises(StorageError, match="broken link"):
        saver.snapshot(2, owned(state(), 0, 1))


def test_no_room_is_known_before_writing(store, monkeypatch):
    monkeypatch.setattr(type(store._backend), "free_bytes", lambda self: 1000)
    saver = Saver(store, rank=0, world=1, attempt=1, on_part=lambda p: None)
    saver.snapshot(1, owned(state(), 0, 1))
    with pytest.raises(StorageError, match="MiB are needed"):
        saver.wait()
    assert store.sizes() == {}


def test_an_emergency_save_works_from_a_side_thread_and_after_a_snapshot(store):
    tensors = state(5)
    savers = [Saver(store, rank=r, world=2, attempt=1, on_part=lambda p: None) for r in range(2)]
    savers[0].snapshot(4, owned(state(4), 0, 2))
    parts: list = [None, None]

    def emergency(rank: int) -> None:
        parts[rank] = savers[rank].emergency(5, owned(tensors, rank, 2), {"why": "peer failed"})

    threads = [threading.Thread(target=emergency, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    manifest = merge(parts, Meta(step=5))
    commit(store, manifest)
    assert differs(store, manifest, tensors, 3) == []
    savers[1].snapshot(6, owned(tensors, 1, 2))
    savers[1].wait()
    again = savers[1].emergency(6, owned(tensors, 1, 2))
    assert again.files == savers[1].emergency(6, owned(tensors, 1, 2)).files  # what is saved is not saved twice


def test_saving_a_step_again_never_touches_the_files_of_the_first(store):
    first = save(store, 1, state(1))
    second = save(store, 1, state(2))
    assert not {f.name for f in first.files} & {f.name for f in second.files}
    assert Manifest.read(store, folder_of(1)) == second
    assert differs(store, second, state(2)) == []


def test_the_newest_whole_checkpoint_is_found_and_the_others_are_named(store):
    for step in (1, 2, 3, 4):
        save(store, step, state(step))
    root = store.local_path()
    shutil.rmtree(root / folder_of(4))
    (root / folder_of(4)).mkdir()
    next((root / folder_of(3)).glob("shard-*")).unlink()
    manifest = root / folder_of(2) / "manifest.json"
    manifest.write_bytes(manifest.read_bytes().replace(b'"epoch":0', b'"epoch":1'))
    found, rejected = newest_valid(store)
    assert found.step == 1
    assert [folder for folder, _ in rejected] == [folder_of(3), folder_of(2)]
    assert "is missing" in rejected[0][1]
    assert "altered" in rejected[1][1]
    assert newest_valid(store, skip=[folder_of(1)])[0] is None


def test_a_manifest_of_another_step_is_seen(store):
    save(store, 1, state(1))
    save(store, 2, state(2))
    root = store.local_path()
    shutil.copy(root / folder_of(1) / "manifest.json", root / folder_of(2) / "manifest.json")
    with pytest.raises(CheckpointDamaged, match="is of step 1, its folder of step 2"):
        Manifest.read(store, folder_of(2))


def damage(rng: random.Random, folder, others) -> str:
    """Does one random harm to a checkpoint's folder."""
    files = sorted(folder.iterdir())
    victim = rng.choice(files)
    size = victim.stat().st_size
    match rng.choice(["flip", "truncate", "grow", "delete", "swap", "zero", "other"]):
        case "flip":
            data = bytearray(victim.read_bytes())
            data[rng.randrange(size)] ^= 1 << rng.randrange(8)
            victim.write_bytes(data)
            return f"flip {victim.name}"
        case "truncate":
            with victim.open("r+b") as file:
                file.truncate(rng.randrange(size))
            return f"truncate {victim.name}"
        case "grow":
            with victim.open("ab") as file:
                file.write(rng.randbytes(rng.randrange(1, 100)))
            return f"grow {victim.name}"
        case "delete":
            victim.unlink()
            return f"delete {victim.name}"
        case "swap":
            one, two = rng.sample(files, 2)
            content = one.read_bytes()
            one.write_bytes(two.read_bytes())
            two.write_bytes(content)
            return f"swap {one.name} {two.name}"
        case "zero":
            start = rng.randrange(size)
            data = bytearray(victim.read_bytes())
            data[start : start + 512] = bytes(len(data[start : start + 512]))
            changed = data != victim.read_bytes()
            victim.write_bytes(data)
            return f"zero {victim.name}" if changed else ""
        case _:
            shutil.copy(sorted(others.iterdir())[files.index(victim)], victim)
            return f"other {victim.name}"


@pytest.mark.slow
def test_random_damage_is_always_found_and_never_loaded(store):
    tensors, older = state(2, large=1_000_000), state(1, large=1_000_000)
    save(store, 1, older, 3)
    whole = save(store, 2, tensors, 3)
    root = store.local_path()
    shutil.copytree(root / folder_of(2), root / "copy")
    rng = random.Random(1)
    harmed = 0
    while harmed < 150:
        what = damage(rng, root / folder_of(2), root / folder_of(1))
        harmed += bool(what)
        if what:
            found, _ = newest_valid(store)
            if found.step == 2:
                with pytest.raises(CheckpointDamaged) as caught:
                    differs(store, found, tensors)
                assert folder_of(2) in str(caught.value), what
                found, _ = newest_valid(store, skip=[folder_of(2)])
            assert found.step == 1, what
            assert (
                not verify(store, choose(store, 2)).whole if (root / folder_of(2) / "manifest.json").exists() else True
            )
        shutil.rmtree(root / folder_of(2))
        shutil.copytree(root / "copy", root / folder_of(2))
    assert differs(store, whole, tensors) == []
    assert differs(store, newest_valid(store, skip=[folder_of(2)])[0], older) == []


def test_verify_names_all_damage_and_show_tells_what_is_there(store):
    manifest = save(store, 1, {"model/w": torch.randn(40 * BLOCK_BYTES // 4)}, trainer={"lr": 0.1})
    check = verify(store, choose(store))
    assert check.whole
    assert check.verified_bytes == manifest.total_bytes
    folder = store.local_path(manifest.folder)
    with (folder / manifest.files[0].name).open("r+b") as file:
        file.seek(9 * BLOCK_BYTES)
        file.write(b"harm")
    (folder / manifest.files[1].name).unlink()
    check = verify(store, choose(store, 1))
    assert len(check.damage) == 2
    assert "block 9 " in check.damage[0]
    assert "is missing" in check.damage[1]
    facts = show(store, choose(store))
    assert facts["trainer"] == {"lr": 0.1}
    assert facts["tensors"]["model/w"]["shape"] == [40 * BLOCK_BYTES // 4]
    with pytest.raises(StorageError, match="no checkpoint of step 7; steps: 1"):
        choose(store, 7)


def test_export_is_what_other_tools_read(store, tmp_path, monkeypatch):
    tensors = state()
    save(store, 1, tensors, 3)
    target = Store.open(str(tmp_path / "out"))
    written = export(store, choose(store), target, config={"model_type": "tiny"})
    assert written == ["model.safetensors", "config.json"]
    model = {n.removeprefix("model/"): t for n, t in tensors.items() if n.startswith("model/")}
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == model.keys()
    assert all(torch.equal(found[n], t) for n, t in model.items())

    monkeypatch.setattr("rung.launcher.checkpoint.inspect.EXPORT_FILE_BYTES", 100_000)
    many = Store.open(str(tmp_path / "many"))
    written = export(store, choose(store), many)
    assert written[-1] == "model.safetensors.index.json"
    shards = {}
    for name in written[:-1]:
        shards |= load_file(tmp_path / "many" / name)
    assert all(torch.equal(shards[n], t) for n, t in model.items())


@pytest.mark.parametrize("window", [1000, 70_000])
def test_export_cuts_tensors_into_chunks_of_any_size(store, tmp_path, window):
    tensors = {**state(), "model/wide": torch.randn(5003, dtype=torch.float64)}
    save(store, 1, tensors, 3)
    store.window_bytes = window
    target = Store.open(f"memory://export-{window}/{tmp_path.name}")
    assert export(store, choose(store), target) == ["model.safetensors"]
    found = load(target.read("model.safetensors"))
    assert all(torch.equal(found[n.removeprefix("model/")], t) for n, t in tensors.items() if n.startswith("model/"))


def test_export_of_a_damaged_checkpoint_leaves_no_file(store, tmp_path):
    manifest = save(store, 1, {"model/w": torch.randn(30 * BLOCK_BYTES // 4)})
    path = store.local_path(manifest.folder) / manifest.files[0].name
    with path.open("r+b") as file:
        file.seek(12 * BLOCK_BYTES + 5)
        file.write(b"XX")
    for target in (Store.open(str(tmp_path / "out")), Store.open(f"memory://damaged/{tmp_path.name}")):
        with pytest.raises(CheckpointDamaged, match="block 12 "):
            export(store, choose(store), target)
        assert target.list() == []


def test_export_holds_a_chunk_in_memory_not_a_file(store, tmp_path):
    """64 tensors of 4 MiB, and one of 128 MiB."""
    growth = {}
    for step, (count, size) in enumerate(((64, 2**20), (1, 2**25))):
        save(store, step, {f"model/{n}": torch.ones(size) for n in range(count)}, 2)
        code = f"""
from pathlib import Path
from rung.launcher.checkpoint.inspect import choose, export
from rung.launcher.storage import Store
store, target = Store.open({store.url!r}), Store.open({str(tmp_path / "out")!r})
info = choose(store, {step})
import concurrent.futures.thread
def peak():
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])
before = peak()
export(store, info, target)
print(peak() - before)
"""
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        growth[count] = int(done.stdout) / 2**10
    print(f"export grows by {growth[64]:.0f} MiB (64 tensors of 4 MiB), {growth[1]:.0f} MiB (one of 128 MiB)")
    assert 4 < max(growth.values()) < 32, growth
    assert (tmp_path / "out" / "model.safetensors").stat().st_size > 2**27


@pytest.mark.slow
def test_a_hundred_thousand_small_tensors_are_no_burden(store):
    flat = torch.randn(100_000 * 16)
    tensors = dict(zip((f"model/block.{i}.weight" for i in range(100_000)), flat.split(16), strict=True))
    intervals = [Interval(name=n, shape=(16,), dtype=torch.float32, start=0, data=t) for n, t in tensors.items()]
    parts = []
    saver = Saver(store, rank=0, world=1, attempt=1, on_part=parts.append)
    saver.snapshot(1, intervals)
    blocked = saver.snapshot(2, intervals)
    saver.wait()
    assert blocked.copied_s < 1.0  # 0.1 s on an idle core; a copy for each tensor takes ten times as long
    manifest = merge([parts[1]], Meta(step=2))
    again = blank(intervals)
    began = time.perf_counter()
    Loader(store, manifest).fill(again)
    assert time.perf_counter() - began < 5.0
    assert torch.equal(torch.cat([i.data for i in again]), flat)
    assert len(parts_of(store, 3, {"model/x": torch.ones(1)})) == 1
