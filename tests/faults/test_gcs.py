"""A run on Google Cloud Storage's protocol, over a real socket: an emulator in a process of its own."""

import json
import random
import subprocess
import sys
import time
import urllib.request

import pytest

from rung.launcher.checkpoint.lease import Lease
from rung.launcher.storage import Store
from rung.strategies.errors import ObjectMissing, RunLocked, StorageError
from tests.launcher.checkpoints import lives_on

pytestmark = pytest.mark.slow
pytest.importorskip("gcsfs", reason="the gcs extra is not installed")
pytest.importorskip("gcp_storage_emulator", reason="gcp-storage-emulator is not installed")

SECRET = "ya29.an-access-token-of-nobody"
EMULATOR = """
import sys
from gcp_storage_emulator.server import create_server
server = create_server("127.0.0.1", 0, in_memory=True)
server.start()
while server._api._httpd is None:
    pass
print(server._api._httpd.server_address[1], flush=True)
sys.stdin.read()
server.stop()
"""


@pytest.fixture(scope="module")
def endpoint():
    process = subprocess.Popen(
        [sys.executable, "-c", EMULATOR],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.kill()
        process.communicate(timeout=20)


def open_gcs(endpoint, path, **more):
    return Store.open(f"gs://{path}", {"endpoint_url": endpoint, "token": "anon", "project": "p", **more}, patience_s=3)


def make_bucket(endpoint, name):
    body = json.dumps({"name": name}).encode()
    request = urllib.request.Request(f"{endpoint}/storage/v1/b?project=p", data=body, method="POST")
    request.add_header("Content-Type", "application/json")
    urllib.request.urlopen(request, timeout=10).close()


def test_a_run_lives_on_gcs(endpoint):
    make_bucket(endpoint, "bucket")
    store = open_gcs(endpoint, "bucket/run")
    began = time.monotonic()
    store.probe()
    assert time.monotonic() - began < 20  # gcsfs's own class waits a minute for an answer by gRPC
    lives_on(store)


def test_a_large_object_comes_back_as_it_was(endpoint):
    make_bucket(endpoint, "large")
    store = open_gcs(endpoint, "large/run")
    data = random.Random(0).randbytes(9 << 20)
    store.write("large", data)
    found = bytearray(len(data))
    width = 2 << 20
    store.read_ranges("large", [(at, memoryview(found)[at : at + width]) for at in range(0, len(data), width)])
    assert found == data
    with pytest.raises(ObjectMissing, match="gs://large/run/none"):
        store.read("none")


def test_one_launcher_holds_a_run_on_gcs_and_a_second_is_refused(endpoint):
    make_bucket(endpoint, "leased")
    with Lease.acquire(open_gcs(endpoint, "leased/run")), pytest.raises(RunLocked, match="in use by process"):
        Lease.acquire(open_gcs(endpoint, "leased/run"))
    with Lease.acquire(open_gcs(endpoint, "leased/run")):
        pass


def test_what_gcs_refuses_is_said_without_secrets(endpoint, capfd, caplog):
    from google.oauth2.credentials import Credentials

    with pytest.raises(StorageError, match=r"writing gs://nowhere/run/\.probe-.* failed") as caught:
        open_gcs(endpoint, "nowhere/run", token=Credentials(SECRET)).probe()
    assert "bucket" in caught.value.hint
    said = capfd.readouterr()
    assert "Traceback" not in said.err
    assert SECRET not in str(caught.value) + caught.value.hint + said.out + said.err + caplog.text
