"""Stores that fail for real: a faulty S3 over a socket, a full disk, no permission, a killed process, Azure."""

import base64
import multiprocessing
import os
import random
import shutil
import signal
import socket
import subprocess
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from rung.launcher.checkpoint.find import find, newest_valid
from rung.launcher.checkpoint.lease import Lease
from rung.launcher.checkpoint.load import Loader
from rung.launcher.checkpoint.manifest import folder_of
from rung.launcher.checkpoint.retention import prune, sweep
from rung.launcher.checkpoint.save import Saver
from rung.launcher.storage import Store
from rung.strategies.errors import CheckpointDamaged, RunLocked, StorageError
from tests.faults.endless_saver import save_for_ever
from tests.faults.faulty_proxy import FaultyProxy
from tests.launcher.checkpoints import differs, lives_on, owned, save, state

pytestmark = pytest.mark.slow
SECRET = "a-secret-access-key-of-nobody"


@pytest.fixture(scope="module")
def proxy():
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    with FaultyProxy(f"http://{host}:{port}") as faulty:
        yield faulty
    server.stop()


@pytest.fixture
def s3(proxy, request):
    """A run folder in a bucket of its own, seen through the proxy."""
    proxy.calm()
    bucket = f"bucket-{abs(hash(request.node.name)) % 10**9}"
    store = open_s3(proxy, f"{bucket}/run")
    urllib.request.urlopen(urllib.request.Request(f"{proxy.url}/{bucket}", method="PUT"), timeout=10).close()
    proxy.calm()
    yield store
    proxy.calm()


def open_s3(proxy, path: str, *, patience_s: float = 20.0, stall_s: float = 1.0) -> Store:
    options = {"key": "access-key-id", "secret": SECRET, "endpoint_url": proxy.url,
               "client_kwargs": {"region_name": "us-east-1"}}  # fmt: skip
    return Store.open(f"s3://{path}", options, patience_s=patience_s, stall_s=stall_s)


def impatient(proxy, s3: Store) -> Store:
    return open_s3(proxy, s3.url.removeprefix("s3://"), patience_s=1.0)


def test_a_run_lives_on_s3(s3, proxy):
    s3.probe()
    lives_on(s3)


def test_a_large_object_goes_up_in_parts_and_comes_down_in_ranges(s3, proxy, monkeypatch):
    monkeypatch.setattr("rung.launcher.storage_fsspec._PART_BYTES", 5 << 20)  # the least that S3 allows
    data = random.Random(0).randbytes(17 << 20)
    s3.write("large", data)
    assert sum("partNumber" in path for method, path in proxy.log if method == "PUT") == 4
    proxy.log.clear()
    found = bytearray(len(data))
    width = 4 << 20
    s3.read_ranges("large", [(at, memoryview(found)[at : at + width]) for at in range(0, len(data), width)])
    assert found == data
    assert [method for method, _ in proxy.log] == ["GET"] * 5


@pytest.mark.parametrize("kind", ["500", "503", "reset", "stall", "short"])
def test_passing_trouble_is_ridden_out(s3, proxy, kind):
    tensors = state(1, large=600_000)
    times = 1 if kind == "stall" else 3
    ways = ("GET",) if kind == "short" else ("PUT", "GET")  # the answer to a PUT has no body to cut short
    for way in ways:
        proxy.fault(kind, times, (way,), "shard")
        proxy.fault(kind, times, (way,), "manifest")
    manifest = save(s3, 1, tensors, 2)
    found, _ = newest_valid(s3)
    assert found == manifest
    assert differs(s3, found, tensors) == []
    assert proxy.struck == len(ways) * 2 * times


@pytest.mark.parametrize("kind", ["500", "reset", "stall"])
def test_lasting_trouble_ends_in_a_clear_error_and_the_old_set_stays(s3, proxy, kind):
    save(s3, 1, state(1), 2)
    hasty = impatient(proxy, s3)
    proxy.fault(kind, 10**6, ("PUT", "POST"))
    began = time.monotonic()
    with pytest.raises(StorageError, match=r"writing s3://.*shard-.* failed: the store is not answering") as caught:
        save(hasty, 2, state(2), 2)
    assert time.monotonic() - began < 45.0
    assert SECRET not in str(caught.value)
    assert caught.value.exit_code == 6
    proxy.calm()
    found, rejected = newest_valid(s3)
    assert (found.step, rejected) == (1, [])
    assert differs(s3, found, state(1)) == []


def test_data_that_is_always_short_is_an_error_never_a_load(s3, proxy):
    manifest = save(s3, 1, state(1))
    proxy.fault("short", 10**6, ("GET",), "shard")
    with pytest.raises(StorageError, match=r"reading s3://.*shard-.* failed: the store is not answering"):
        differs(impatient(proxy, s3), manifest, state(1))


def test_a_bit_that_flips_on_the_way_is_read_again_and_one_at_rest_is_damage(s3, proxy):
    manifest = save(s3, 1, state(1))
    proxy.fault("flip", 1, ("GET",), "shard")
    assert differs(s3, manifest, state(1)) == []
    assert proxy.struck == 1
    proxy.fault("flip", 10**6, ("GET",), "shard")
    with pytest.raises(CheckpointDamaged, match=r"shard-.* is damaged: block \d+ .* has hash \w+, expected \w+"):
        differs(s3, manifest, state(1))


def test_denied_access_is_not_tried_again(s3, proxy):
    proxy.fault("403", 10**6)
    began = time.monotonic()
    with pytest.raises(StorageError, match="access is denied") as caught:
        s3.probe()
    assert time.monotonic() - began < 5.0
    assert "credentials" in caught.value.hint
    assert SECRET not in str(caught.value)


def test_a_bucket_that_is_not_there_is_named(proxy):
    proxy.calm()
    with pytest.raises(StorageError, match=r"s3://nowhere/run"):
        open_s3(proxy, "nowhere/run", patience_s=1.0).probe()


def test_a_server_that_is_not_there_is_an_error_within_its_patience():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    options = {"key": "k", "secret": SECRET, "endpoint_url": f"http://127.0.0.1:{port}"}
    began = time.monotonic()
    with pytest.raises(StorageError, match="not answering"):
        Store.open("s3://bucket/run", options, patience_s=1.0).probe()
    assert time.monotonic() - began < 40.0


def test_one_launcher_holds_a_run_on_s3_and_a_second_is_refused(s3, proxy):
    other = open_s3(proxy, s3.url.removeprefix("s3://"))
    with Lease.acquire(s3) as lease:
        with pytest.raises(RunLocked, match=f"in use by process {os.getpid()} on"):
            Lease.acquire(other)
        lease.check(fresh=True)
    with Lease.acquire(other):
        pass


# ------------------------------------------------------------------------------------------------ local disks


@contextmanager
def mounted(folder: Path, size: str):
    """A small file system in memory, taken away again."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"this user may not mount a tmpfs: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True, timeout=20)


def test_a_full_disk_is_an_error_and_the_old_checkpoint_stays(tmp_path):
    with mounted(tmp_path / "small", "24m") as folder:
        store = Store.open(str(folder / "run"))
        tensors = {"model/w": torch.randn(2 << 20)}  # 8 MiB
        save(store, 1, tensors)
        # Each of two ranks sees room for its own half, and there is not room for both.
        large = {"model/w": torch.randn(6 << 20)}
        with pytest.raises(StorageError, match=r"no space is left|are needed") as caught:
            save(store, 2, large, 2)
        assert "free some space" in caught.value.hint
        assert find(store)[0].step == 1
        with pytest.raises(StorageError, match="no space is left"):
            store.write("big", bytes(30 << 20))
        found, _ = newest_valid(store)
        assert differs(store, found, tensors) == []
        sweep(store)
        store.delete("big")
        save(store, 3, tensors)
        assert differs(store, newest_valid(store)[0], tensors) == []


def test_a_failed_save_gives_its_room_back(tmp_path):
    with mounted(tmp_path / "small", "24m") as folder:
        store = Store.open(str(folder / "run"))
        store.probe()
        saver = Saver(store, rank=0, world=1, attempt=1, on_part=lambda part: None)
        store.require_free = lambda needed: None  # another process fills the disk after we have looked
        saver.snapshot(1, owned({"model/w": torch.randn(12 << 20)}, 0, 1))
        with pytest.raises(StorageError, match="no space is left"):
            saver.wait()
        assert store.free_bytes() > 20 << 20


def test_a_read_only_disk_is_told_by_the_probe(tmp_path):
    with mounted(tmp_path / "frozen", "4m") as folder:
        (folder / "run").mkdir()
        subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True, timeout=20)
        with pytest.raises(StorageError, match="the store is read-only") as caught:
            Store.open(str(folder / "run")).probe()
        assert str(folder / "run") in str(caught.value)


def test_no_permission_is_told_by_the_probe(tmp_path):
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)
    (tmp_path / "run").mkdir(mode=0o755)
    was_root = os.geteuid() == 0
    if was_root:
        os.seteuid(65534)  # nobody: root may write anywhere
    else:
        (tmp_path / "run").chmod(0o555)
    try:
        with pytest.raises(StorageError, match="access is denied") as caught:
            Store.open(str(tmp_path / "run")).probe()
    finally:
        if was_root:
            os.seteuid(0)
    assert "permissions" in caught.value.hint


# ------------------------------------------------------------------------------------------------ killed processes


def test_a_process_killed_at_any_moment_leaves_the_old_set_or_the_new_one(tmp_path):
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "rung.launcher.checkpoint.save", "rung.launcher.checkpoint.load"])
    store = Store.open(str(tmp_path / "run"))
    rng = random.Random(0)
    newest = 0
    for _ in range(30):
        process = context.Process(target=save_for_ever, args=(str(tmp_path / "run"), newest + 1))
        process.start()
        deadline = time.monotonic() + 30
        while (not (infos := find(store)) or infos[0].step <= newest) and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(rng.random() * 0.15)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join(20)
        found, rejected = newest_valid(store)
        assert found is not None
        assert found.step > newest
        assert rejected == []
        newest = found.step
        assert Loader(store, found).full_tensor("model/w").unique().tolist() == [newest]
        assert Loader(store, found).full_tensor("optim.m/w").unique().tolist() == [newest]
        sweep(store)
        assert len(find(store)) <= 3
        assert set(store.list(found.folder)) == {"manifest.json", *(f.name for f in found.files)}


# ------------------------------------------------------------------------------------------------ Azure

AZURITE = "azurite@3.35.0"
CACHE = Path(__file__).parents[2] / "build" / "azurite"


@pytest.fixture(scope="module")
def azurite(tmp_path_factory):
    """A local Azure blob service; installed once below build/."""
    program = CACHE / "node_modules" / ".bin" / "azurite-blob"
    if not program.exists():
        if shutil.which("npm") is None:
            pytest.skip("npm is not installed, so Azurite cannot be")
        command = ["npm", "install", "--no-audit", "--no-fund", "--prefix", str(CACHE), AZURITE]
        CACHE.mkdir(parents=True, exist_ok=True)
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
        except subprocess.TimeoutExpired:
            pytest.skip("npm did not install Azurite within 90 s")
        if done.returncode:
            pytest.skip(f"npm could not install Azurite: {done.stderr[-200:]}")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    key = base64.b64encode(os.urandom(64)).decode()
    folder = tmp_path_factory.mktemp("azurite")
    command = [program, "--silent", "--skipApiVersionCheck", "--disableTelemetry", "--location", folder]
    process = subprocess.Popen(
        [*command, "--blobPort", str(port)],
        env={**os.environ, "AZURITE_ACCOUNTS": f"rungtest:{key}"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    endpoint = f"http://127.0.0.1:{port}/rungtest"
    try:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        else:
            pytest.skip("Azurite did not start within 30 s")
        account = f"DefaultEndpointsProtocol=http;AccountName=rungtest;AccountKey={key};BlobEndpoint={endpoint};"
        yield account, key
    finally:
        process.terminate()
        process.wait(20)


def test_a_run_lives_on_azure(azurite):
    connection, key = azurite
    store = Store.open("abfs://container/run", {"connection_string": connection}, patience_s=5.0)
    with pytest.raises(StorageError, match=r"abfs://container/run") as caught:
        store.probe()
    assert key not in str(caught.value)
    store._backend._fs.mkdir("container")
    store.probe()
    tensors = state(1, large=9 << 20)
    for step in (1, 2):
        save(store, step, tensors, 2)
    found, rejected = newest_valid(store)
    assert (found.step, rejected) == (2, [])
    assert differs(store, found, tensors, 3) == []
    assert prune(store, keep=1) == [folder_of(1)]
    assert [info.step for info in find(store)] == [2]
    with Lease.acquire(store), pytest.raises(RunLocked):
        Lease.acquire(Store.open("abfs://container/run", {"connection_string": connection}))
    wrong = connection.replace(key, base64.b64encode(bytes(64)).decode())
    with pytest.raises(StorageError, match="access is denied"):
        Store.open("abfs://container/run", {"connection_string": wrong}, patience_s=2.0).probe()
