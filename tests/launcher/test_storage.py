"""The seam to the stores: reading, writing, listing, errors that name things, and no secrets in them."""

import importlib
import inspect
import os
import pickle
import socket
import subprocess
import sys
import threading
import time

import pytest

from rung.launcher.storage import Store
from rung.launcher.storage_errors import Trouble, classify, clean_url, scrub, storage_error, trouble_of_class
from rung.strategies.errors import DependencyError, JobError, ObjectMissing, StorageError


@pytest.fixture(params=["disk", "memory"])
def store(request, tmp_path):
    if request.param == "disk":
        yield Store.open(str(tmp_path / "deep" / "run"))
        return
    opened = Store.open(f"memory://test-storage/{tmp_path.name}")
    yield opened
    opened.delete_folder("")


def test_what_is_written_is_read_listed_measured_and_deleted(store):
    store.probe()
    assert store.sizes() == {}
    store.write("a/b.bin", b"0123456789")
    store.write_atomic("a/c.json", b"{}")
    assert store.sizes() == {"a/b.bin": 10, "a/c.json": 2}
    assert store.sizes("a") == {"b.bin": 10, "c.json": 2}
    assert store.list("a") == ["b.bin", "c.json"]
    assert store.read("a/b.bin") == b"0123456789"
    assert (store.size("a/b.bin"), store.exists("a/b.bin"), store.exists("a"), store.exists("x")) == (
        10,
        True,
        False,
        False,
    )
    store.write_atomic("a/c.json", b"[1]")
    assert store.read("a/c.json") == b"[1]"
    store.delete("a/b.bin")
    store.delete("a/b.bin")
    store.delete_folder("a")
    store.delete_folder("a")
    assert store.list() == []


def test_ranges_are_scattered_into_buffers(store):
    data = os.urandom(100_000)
    store.write("x", data)
    parts = [bytearray(n) for n in (1, 70_000, 0, 5_000)]
    store.read_into("x", 17, [memoryview(p) for p in parts])
    assert b"".join(parts) == data[17 : 17 + 75_001]
    ranges = [(i * 1000, bytearray(1000)) for i in range(100)]
    store.read_ranges("x", [(start, memoryview(b)) for start, b in ranges])
    assert b"".join(b for _, b in ranges) == data


def test_more_buffers_than_one_system_call_takes(store):
    data = os.urandom(3000)
    store.write("x", data)
    parts = [bytearray(1) for _ in range(3000)]
    store.read_into("x", 0, [memoryview(p) for p in parts])
    assert b"".join(parts) == data


def test_creation_is_exclusive(store):
    won: list[int] = []

    def create(i: int) -> None:
        if store.create_exclusive("lease", str(i).encode()):
            won.append(i)

    threads = [threading.Thread(target=create, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if store.remote:  # the memory file system has no such operation: readers of `create_exclusive` read back
        assert won
    else:
        assert len(won) == 1
        assert store.read("lease") == str(won[0]).encode()


def test_a_missing_object_is_named(store):
    for act in (store.read, store.size, lambda p: store.read_into(p, 0, [memoryview(bytearray(1))])):
        with pytest.raises(ObjectMissing) as caught:
            act("no/such")
        assert store.url_of("no/such") in str(caught.value)
        assert caught.value.hint
        assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_reading_past_the_end_is_an_error_at_once(tmp_path):
    store = Store.open(str(tmp_path))
    store.write("x", b"abc")
    with pytest.raises(StorageError, match="shorter than expected"):
        store.read_into("x", 1, [memoryview(bytearray(3))])


def test_a_large_object_is_not_read_where_a_small_one_is_expected(store):
    store.write("x", bytes(1000))
    with pytest.raises(StorageError, match="999"):
        store.read("x", limit_bytes=999)


def test_free_space_is_required_before_writing(tmp_path):
    store = Store.open(str(tmp_path))
    store.require_free(1)
    with pytest.raises(StorageError, match="MiB are needed"):
        store.require_free(1 << 60)
    assert Store.open("memory://x").free_bytes() is None


def test_relative_paths_and_file_urls_are_local(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Store.open("runs/a").write("x", b"1")
    assert (tmp_path / "runs/a/x").read_bytes() == b"1"
    assert Store.open(f"file://{tmp_path}/runs/a").read("x") == b"1"
    assert Store.open("runs/a").local_path() == tmp_path / "runs/a"
    assert Store.open("memory://a").local_path() is None


def test_a_missing_package_names_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(DependencyError, match="gs://") as caught:
        Store.open("gs://bucket/run")
    assert 'pip install "rung[gcs]"' in caught.value.hint


def test_an_unknown_kind_of_url_is_a_mistake_in_the_job():
    with pytest.raises(JobError, match="no store is known for nosuch://"):
        Store.open("nosuch://bucket/run")


def test_wrong_options_are_an_error_of_storage():
    options = {"client_kwargs": "not a mapping", "nonsense": 1}
    with pytest.raises(StorageError, match=r"s3://bucket/run.* failed"):
        Store.open("s3://bucket/run", options).probe()


BACKENDS = [
    "botocore.exceptions",
    "botocore.parsers",
    "azure.core.exceptions",
    "aiohttp.client_exceptions",
    "fsspec.exceptions",
    "gcsfs.retry",
    "google.api_core.exceptions",
    "google.auth.exceptions",
]


@pytest.mark.parametrize("module", BACKENDS)
def test_every_error_class_of_the_backends_has_an_entry(module):
    pytest.importorskip(module)
    classes = [
        c
        for _, c in inspect.getmembers(importlib.import_module(module), inspect.isclass)
        if issubclass(c, Exception) and not issubclass(c, Warning) and c.__module__ == module
    ]
    assert classes
    assert not [c.__name__ for c in classes if trouble_of_class(c) is Trouble.UNKNOWN]


def test_status_and_errno_decide_before_the_class():
    from aiohttp import ClientResponseError
    from azure.core.exceptions import HttpResponseError
    from botocore.exceptions import ClientError

    def boto(status: int) -> ClientError:
        return ClientError({"Error": {"Code": "X"}, "ResponseMetadata": {"HTTPStatusCode": status}}, "PutObject")

    for status, trouble in {500: Trouble.TRANSIENT, 503: Trouble.TRANSIENT, 429: Trouble.TRANSIENT,
                            403: Trouble.DENIED, 404: Trouble.MISSING, 412: Trouble.EXISTS,
                            400: Trouble.REFUSED, 501: Trouble.REFUSED, 507: Trouble.FULL}.items():  # fmt: skip
        assert classify(boto(status)) is trouble
        wrapped = OSError(5, "as s3fs does")
        wrapped.__cause__ = boto(status)
        assert classify(wrapped) is trouble
        assert classify(ClientResponseError(None, (), status=status)) is trouble
        azure = HttpResponseError("x")
        azure.status_code = status
        assert classify(azure) is trouble
    assert classify(OSError(28, "x")) is Trouble.FULL
    assert classify(OSError(30, "x")) is Trouble.READ_ONLY
    assert classify(ConnectionResetError()) is Trouble.TRANSIENT
    assert classify(RuntimeError()) is Trouble.UNKNOWN


def test_no_secret_is_said(monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "environment-secret")
    url = "s3://user:hunter22@bucket/run?X-Amz-Signature=abcdef&sig=zyx#frag"
    assert clean_url(url) == "s3://bucket/run"
    assert (
        clean_url("abfs://container@account.dfs.core.windows.net/run")
        == "abfs://container@account.dfs.core.windows.net/run"
    )
    assert clean_url("memory://a/b") == "memory://a/b"
    secrets = Store.open("memory://x", {})._secrets
    assert "environment-secret" in secrets
    said = (
        "AccountKey=abc123==;x https://me:pw@host/?sig=abc%3D&se=1 Authorization: Bearer tok.en 'secret': 'shh' "
        "environment-secret nested-secret"
    )
    clean = scrub(said, (*secrets, "nested-secret"))
    for word in ("abc123", "me:pw", "abc%3D", "tok.en", "shh", "environment-secret", "nested-secret"):
        assert word not in clean
    error = storage_error(PermissionError(f"no: {said}"), doing="writing", url=url, secrets=secrets)
    assert "hunter22" not in str(error)
    assert "environment-secret" not in str(error)
    assert error.__cause__ is None


def test_retries_end_when_patience_does():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    store = Store.open(f"http://127.0.0.1:{port}/run", patience_s=0.6)
    began = time.monotonic()
    with pytest.raises(StorageError, match="not answering") as caught:
        store.read("x")
    assert 0.2 < time.monotonic() - began < 5.0
    assert f"http://127.0.0.1:{port}/run/x" in str(caught.value)


def test_storage_and_manifests_need_no_torch():
    code = (
        "import sys\n"
        "from rung.launcher import storage\n"
        "from rung.launcher.checkpoint import manifest, manifest_json, retention, lease, find, inspect\n"
        "assert not [m for m in sys.modules if m == 'torch' or m.startswith(('fsspec', 's3fs'))]"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
