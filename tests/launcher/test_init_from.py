"""Weights from outside: every layout people have, compared with the model before anything is copied."""

import json
import pickle
import re
import struct

import pytest
import torch
from safetensors.torch import save_file

from rung.launcher.checkpoint.init_from import compare, load_weights, table
from rung.launcher.storage import Store
from rung.strategies.errors import JobError, ObjectMissing, StorageError
from rung.strategies.shards import Interval
from tests.launcher.checkpoints import save

torch.manual_seed(0)
MODEL = {
    "embed.weight": torch.randn(50, 8),
    "body.0.weight": torch.randn(8, 8),
    "body.0.bias": torch.randn(8),
    "head.weight": torch.randn(3, 8),
    "count": torch.tensor(4),
}


def destination(world: int = 1, shapes: dict[str, torch.Tensor] = MODEL) -> list[list[Interval]]:
    """The load intervals of each rank, among them optimizer state, which must stay as it is."""
    ranks = []
    for rank in range(world):
        intervals = []
        for name, tensor in shapes.items():
            shape, dtype = tuple(tensor.shape), tensor.dtype
            low, high = tensor.numel() * rank // world, tensor.numel() * (rank + 1) // world
            for prefix, value in (("model/", 0), ("optim.exp_avg/", 7)):
                data = torch.full((high - low,), value, dtype=dtype)
                intervals.append(Interval(name=prefix + name, shape=shape, dtype=dtype, start=low, data=data))
        ranks.append(intervals)
    return ranks


def loads(url: str, world: int = 1, **options: object) -> None:
    ranks = destination(world)
    for intervals in ranks:
        load_weights(url, intervals, **options)  # type: ignore[arg-type]
    for name, tensor in MODEL.items():
        whole = torch.cat([i.data for intervals in ranks for i in intervals if i.name == f"model/{name}"])
        assert torch.equal(whole, tensor.reshape(-1)), name
    assert all(bool((i.data == 7).all()) for r in ranks for i in r if i.name.startswith("optim"))


def test_one_safetensors_file_or_a_folder_with_it(tmp_path):
    save_file(MODEL, tmp_path / "model.safetensors")
    loads(str(tmp_path / "model.safetensors"))
    loads(str(tmp_path / "model.safetensors"), world=3)
    loads(str(tmp_path))


def test_a_relative_path(tmp_path, monkeypatch):
    save_file(MODEL, tmp_path / "model.safetensors")
    monkeypatch.chdir(tmp_path)
    loads("model.safetensors")
    loads(".")


def test_sharded_safetensors_with_an_index(tmp_path):
    names = list(MODEL)
    where = {}
    for i, part in enumerate((names[:2], names[2:])):
        file = f"model-{i + 1:05}-of-00002.safetensors"
        save_file({n: MODEL[n] for n in part}, tmp_path / file)
        where |= dict.fromkeys(part, file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    save_file({"adapter": torch.ones(1)}, tmp_path / "unrelated.safetensors")
    loads(str(tmp_path), world=2)
    loads(str(tmp_path / "model.safetensors.index.json"))


@pytest.mark.parametrize(
    "wrap",
    [
        lambda m: m,
        lambda m: {"state_dict": m, "epoch": 3},
        lambda m: {"model": {f"module.{n}": t for n, t in m.items()}, "optimizer": {}},
        lambda m: {f"_orig_mod.module.{n}": t for n, t in m.items()},
    ],
)
def test_torch_files_in_the_shapes_that_people_save(tmp_path, wrap):
    torch.save(wrap(MODEL), tmp_path / "model.pt")
    loads(str(tmp_path / "model.pt"), world=2)
    torch.save(wrap(MODEL), tmp_path / "old.bin", _use_new_zipfile_serialization=False)
    loads(str(tmp_path / "old.bin"))


def test_another_run_or_one_of_its_checkpoints(tmp_path):
    store = Store.open(str(tmp_path / "run"))
    state = {f"model/{n}": t for n, t in MODEL.items()} | {"optim.exp_avg/embed.weight": torch.ones(50, 8)}
    manifest = save(store, 3, state, 2)
    for url in (
        tmp_path / "run",
        tmp_path / "run" / manifest.folder,
        tmp_path / "run" / manifest.folder / "manifest.json",
    ):
        loads(str(url), world=3)


def test_a_remote_store(tmp_path):
    store = Store.open("memory://init-from")
    for name, write in (("model.safetensors", lambda p: save_file(MODEL, p)), ("m.pt", lambda p: torch.save(MODEL, p))):
        write(tmp_path / name)
        store.write(name, (tmp_path / name).read_bytes())
        loads(f"memory://init-from/{name}")
    store.delete_folder("")


def test_types_are_converted(tmp_path):
    save_file({n: t.half() if t.is_floating_point() else t for n, t in MODEL.items()}, tmp_path / "m.safetensors")
    intervals = destination()[0]
    load_weights(str(tmp_path / "m.safetensors"), intervals)
    found = next(i.data for i in intervals if i.name == "model/embed.weight")
    assert torch.equal(found, MODEL["embed.weight"].half().float().reshape(-1))


def test_a_mismatch_is_a_table_with_the_nearest_match_and_nothing_is_copied(tmp_path):
    given = {
        "model.embed.weight": MODEL["embed.weight"],
        "body.0.weight": MODEL["body.0.weight"],
        "body.0.bias": MODEL["body.0.bias"],
        "head.weight": torch.randn(10, 8),
        "count": MODEL["count"],
        "extra.bias": torch.randn(2),
    }
    save_file(given, tmp_path / "m.safetensors")
    intervals = destination()[0]
    with pytest.raises(JobError) as caught:
        load_weights(str(tmp_path / "m.safetensors"), intervals)
    said = str(caught.value)
    assert re.search(r"head.weight +model \[3, 8\], weights \[10, 8\]", said)
    assert re.search(r"embed.weight +\[50, 8\], nearest: model.embed.weight", said)
    assert "extra.bias" in said
    assert "allow_mismatch" in caught.value.hint
    assert not any(i.data.any() for i in intervals if i.name.startswith("model/"))
    result = load_weights(str(tmp_path / "m.safetensors"), intervals, ("head.*", "*embed*", "extra.bias"))
    assert sorted(r.kind for r in result.allowed) == ["missing", "shape", "unexpected", "unexpected"]
    found = {i.name: i.data for i in intervals}
    assert torch.equal(found["model/body.0.bias"], MODEL["body.0.bias"])
    assert not found["model/head.weight"].any()


def test_tied_names_are_neither_missing_nor_unexpected():
    result = compare({"embed": (4,)}, {"lm_head": (4,)}, aliases={"lm_head": "embed"})
    assert result.names == {"embed": "lm_head"}
    assert not result.refused
    assert not compare({"embed": (4,)}, {"embed": (4,), "lm_head": (4,)}, aliases={"lm_head": "embed"}).refused


def test_a_rank_that_holds_a_part_compares_the_whole_model(tmp_path):
    save_file(MODEL, tmp_path / "m.safetensors")
    mine = [i for i in destination()[0] if i.name == "model/body.0.bias"]
    with pytest.raises(JobError, match="not in the model"):
        load_weights(str(tmp_path / "m.safetensors"), mine)
    load_weights(str(tmp_path / "m.safetensors"), mine, model={n: tuple(t.shape) for n, t in MODEL.items()})
    assert torch.equal(mine[0].data, MODEL["body.0.bias"])


def test_a_long_table_is_cut():
    rows = compare({}, {f"x{i}": (1,) for i in range(50)}).refused
    assert "... and 30 more" in table(rows)


class Harmful:
    """Makes a file when it is unpickled."""

    def __init__(self, target):
        self.target = str(target)

    def __reduce__(self):
        return (open, (self.target, "w"))


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_nothing_is_unpickled(tmp_path):
    target = tmp_path / "was-here"
    harmful = Harmful(target)
    for content in (harmful, {"w": torch.ones(1), "x": harmful}):
        torch.save(content, tmp_path / "m.pt")
        with pytest.raises(StorageError, match="cannot be read as weights"):
            load_weights(str(tmp_path / "m.pt"), destination()[0])
    (tmp_path / "raw.bin").write_bytes(pickle.dumps(harmful))
    with pytest.raises(StorageError, match="cannot be read as weights"):
        load_weights(str(tmp_path / "raw.bin"), destination()[0])
    assert not target.exists()
    pickle.loads(pickle.dumps(harmful)).close()
    assert target.exists()  # it would have done it


def header(entries: object, data: bytes = b"", length: int | None = None) -> bytes:
    text = json.dumps(entries).encode() if not isinstance(entries, bytes) else entries
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(**changes: object) -> dict[str, object]:
    return {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}


@pytest.mark.parametrize(
    "content",
    [
        b"", b"\x00" * 7, header({}, length=1 << 60), header({}, length=100),
        header(b"[]"), header(b"nope"), header(b"[" * 5000),
        header({"w": 1}), header({"w": {}}), header({"w": entry()}), header({"w": entry(dtype="X")}, bytes(8)),
        header({"w": entry(dtype=[])}, bytes(8)), header({"w": entry(shape=[3])}, bytes(8)),
        header({"w": entry(shape=[-1, -2])}, bytes(8)), header({"w": entry(data_offsets=[-8, 0])}, bytes(8)),
        header({"w": entry(data_offsets=[8, 16])}, bytes(8)), header({"w": entry(shape=[1 << 60, 1 << 60])}, bytes(8)),
        header({"w": entry(shape=[2.0])}, bytes(8)), header({"w": entry(data_offsets=[0])}, bytes(8)),
    ],
)  # fmt: skip
def test_hostile_safetensors_headers_are_refused(tmp_path, content):
    (tmp_path / "m.safetensors").write_bytes(content)
    with pytest.raises(StorageError, match=r"m.safetensors is not a sound safetensors file"):
        load_weights(str(tmp_path / "m.safetensors"), destination()[0])


def test_an_index_cannot_reach_outside_its_folder(tmp_path):
    save_file(MODEL, tmp_path / "secret.safetensors")
    (tmp_path / "in").mkdir()
    for name in ("../secret.safetensors", str(tmp_path / "secret.safetensors"), ".hidden.safetensors"):
        index = {"weight_map": dict.fromkeys(MODEL, name)}
        (tmp_path / "in" / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(StorageError, match="outside its folder"):
            load_weights(str(tmp_path / "in"), destination()[0])


def test_nothing_there_says_what_was_looked_for(tmp_path):
    with pytest.raises(ObjectMissing, match=r"no checkpoint of rung, no .safetensors, no .pt"):
        load_weights(str(tmp_path), destination()[0])
    with pytest.raises(ObjectMissing, match=r"nope.safetensors"):
        load_weights(str(tmp_path / "nope.safetensors"), destination()[0])
    with pytest.raises(ObjectMissing, match=r"nope.pt"):
        load_weights(str(tmp_path / "nope.pt"), destination()[0])
