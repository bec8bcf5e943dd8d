"""A manifest that nobody vouches for gives an error: it runs nothing, reaches nothing outside, allocates little."""

import copy
import json
import random
import tracemalloc

import pytest
import xxhash

from rung.launcher.checkpoint.manifest import LIMIT_BYTES, Manifest
from rung.launcher.checkpoint.manifest_json import _HEAD
from rung.launcher.storage import Store
from rung.strategies.errors import CheckpointDamaged, StorageError
from tests.launcher.checkpoints import differs, save, state


def sealed(body: object) -> bytes:
    """A manifest with the right hash: what an attacker would write, not what damage leaves."""
    text = (body if isinstance(body, str) else json.dumps(body)).encode()
    return (_HEAD % xxhash.xxh3_64_hexdigest(text)).encode() + text + b"}\n"


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return Store.open(str(tmp_path_factory.mktemp("hostile")))


@pytest.fixture(scope="module")
def body(store):
    data = save(store, 1, state(large=2000, small=3), 2).to_bytes()
    return json.loads(data)["manifest"]


def set_at(body: dict, path: tuple, value: object) -> dict:
    changed = copy.deepcopy(body)
    place = changed
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return changed


NAMES = [
    "../x",
    "/etc/passwd",
    "a/b",
    "..",
    ".hidden",
    "",
    "a\x00b",
    "a\\b",
    "x" * 300,
    5,
    None,
    ["a"],
    "manifest.json/../x",
]


@pytest.mark.parametrize("name", NAMES)
def test_names_cannot_leave_the_folder(body, name):
    with pytest.raises(ValueError, match=r"name of a file|twice"):
        Manifest.from_bytes(sealed(set_at(body, ("files", 0, 0), name)), folder="x")


BAD = [
    (("version",), 2, "version is 2"),
    (("version",), None, "version"),
    (("format",), "other", "not a manifest of rung"),
    (("step",), -1, "step"),
    (("step",), True, "step"),
    (("step",), 1.0, "step"),
    (("seed",), 1 << 80, "seed"),
    (("strategy",), 3, "strategy"),
    (("healthy",), 1, "healthy"),
    (("created_s",), "now", "created_s"),
    (("metrics",), {"a": "b"}, "metric"),
    (("metrics",), {"a": 10**400}, "out of range"),
    (("trainer",), [], "trainer"),
    (("aliases",), {"model/tied": "model/nowhere"}, "alias"),
    (("aliases",), {"model/large": "model/half"}, "alias"),
    (("files",), {}, "files"),
    (("files", 0), ["a", 1, 2], "entry of files"),
    (("files", 0, 1), 1 << 60, "size of"),
    (("files", 0, 1), -1, "size of"),
    (("files", 0, 2), 0, "block size"),
    (("files", 0, 2), 65537, "block size"),
    (("files", 0, 3), "zz" * 8, "non-hexadecimal|hashes"),
    (("files", 0, 3), " " * 16, "hashes"),
    (("files", 0, 3), "00" * 800, "hashes"),
    (("tensors",), [], "tensors"),
    (("tensors", "model/large"), 3, "entry of tensor"),
    (("tensors", "model/large", "dtype"), "F31", "unknown type"),
    (("tensors", "model/large", "dtype"), ["F32"], "unknown type"),
    (("tensors", "model/large", "shape"), [20, 101], "model/large"),
    (("tensors", "model/large", "shape"), [1 << 53, 1 << 53], "too large"),
    (("tensors", "model/large", "shape"), [-20, -100], "size of tensor"),
    (("tensors", "model/large", "shape"), [1] * 65, "shape"),
    (("tensors", "model/large", "pieces"), [], "nobody wrote"),
    (("tensors", "model/large", "pieces"), None, "pieces"),
    (("tensors", "model/large", "pieces"), [[0, 0, 2000]], "piece"),
    (("tensors", "model/large", "pieces"), [[0, 0, 2000, 1 << 70]], "out of range"),
    (("tensors", "model/large", "pieces"), [[0, 0, 2000, 64, 1.5, 1]], "piece"),
    (("tensors", "model/large", "pieces"), [[9, 0, 2000, 64]], "not listed"),
    (("tensors", "model/large", "pieces"), [[0, 0, 2000, 1 << 40]], "behind the end"),
    (("tensors", "model/large", "pieces"), [[0, 0, 2000, 65]], "multiple"),
    (("tensors", "model/large", "pieces"), [[0, 0, 1, 64, 2000, 0]], "repeats itself"),
    (("tensors", "model/large", "pieces"), [[0, 0, 1, 64, 2000, 1]], "not listed"),
    (("tensors", "model/large", "pieces"), [[0, 0, 0, 64, 2000, 1]], "empty"),
    (("tensors", "model/large", "pieces"), [[0, 0, 1, 64, 1 << 52, 1]], "more than|too long"),
    (("tensors", "model/large", "pieces"), [[0, 0, 1 << 53, 64, 1 << 25, 1]], "too long|more than"),
    (("tensors", "model/large", "pieces"), [[0, -5, 2000, 64]], "out of range"),
]


@pytest.mark.parametrize(("path", "value", "message"), BAD)
def test_what_cannot_be_is_refused_with_its_reason(body, path, value, message):
    with pytest.raises(ValueError, match=message):
        Manifest.from_bytes(sealed(set_at(body, path, value)), folder="x")


def test_text_that_is_no_manifest_is_refused():
    for data in (b"", b"{}", b"[" * 100, sealed("[" * 200_000), sealed('{"a":' * 100_000), sealed("[]"), sealed("nan"),
                 sealed('{"version": ' + "9" * 10_000 + "}"), b"\x80\x04]\x94.", sealed("{}")[:-3]):  # fmt: skip
        with pytest.raises(ValueError, match=r"\w"):
            Manifest.from_bytes(data, folder="x")


def test_a_huge_file_is_not_read(store):
    path = store.local_path("huge/manifest.json")
    path.parent.mkdir()
    with path.open("wb") as file:
        file.truncate(LIMIT_BYTES + 1)
    tracemalloc.start()
    with pytest.raises(StorageError, match="allowed"):
        Manifest.read(store, "huge")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


def mutate(rng: random.Random, value: object, depth: int = 0) -> object:
    """Changes something somewhere."""
    odd = [
        None,
        -1,
        0,
        1,
        2**31,
        2**63,
        2**64,
        10**30,
        0.5,
        float("nan"),
        "",
        "../..",
        "F32",
        [],
        {},
        True,
        [[0, 0, 1, 0]],
    ]
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(list(value))
        match rng.randrange(8):
            case 0:
                return {k: v for k, v in value.items() if k != key}
            case 1:
                return {**value, rng.choice(["", "model/x", "../../x", "\ud800"]): value[key]}
            case _:
                return {**value, key: mutate(rng, value[key], depth + 1)}
    if isinstance(value, list) and value and rng.random() < 0.9:
        i = rng.randrange(len(value))
        match rng.randrange(8):
            case 0:
                return value[:i] + value[i + 1 :]
            case 1:
                return [*value, value[i]]
            case _:
                return [*value[:i], mutate(rng, value[i], depth + 1), *value[i + 1 :]]
    if isinstance(value, int) and rng.random() < 0.5:
        return value + rng.choice([-1, 1, 4, 64, -64, 1 << 20, 1 << 40])
    return rng.choice(odd)


def test_fuzzed_manifests_give_an_error_or_the_right_tensors(store, body):
    """Each of 1,500 mutations, hash and all, is refused, or changes nothing that a load depends on."""
    rng = random.Random(0)
    tensors = state(large=2000, small=3)
    accepted = 0
    for _ in range(1500):
        changed = mutate(rng, body)
        for _ in range(rng.randrange(3)):
            changed = mutate(rng, changed)
        try:
            manifest = Manifest.from_bytes(sealed(changed), folder="checkpoints/step-000000001")
        except ValueError:
            continue
        accepted += 1
        if manifest.tensors.names == tuple(body["tensors"]) and manifest.tensors.shapes == shapes(body):
            try:
                wrong = differs(store, manifest, tensors)
            except (CheckpointDamaged, StorageError):
                continue
            # A piece may be pointed at other verified bytes of the same file: only its author's hash could tell.
            assert all(changed["tensors"][name] != body["tensors"][name] for name in wrong)
    assert accepted > 20


def shapes(body: dict) -> tuple:
    return tuple(tuple(entry["shape"]) for entry in body["tensors"].values())


def test_flipped_bits_are_always_seen(store, body):
    data = sealed(body)
    rng = random.Random(0)
    for _ in range(500):
        spoiled = bytearray(data)
        spoiled[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        with pytest.raises(ValueError, match=r"\w"):
            Manifest.from_bytes(bytes(spoiled), folder="x")
