"""A run on Google Cloud Storage's protocol, over a real socket: an emulator in a process of its own."""

import http.server
import json
import random
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from typing import ClassVar

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


def test_a_bucket_that_is_not_there_is_named(endpoint):
    with pytest.raises(StorageError, match=r"writing gs://nowhere/run/\.probe-.* failed") as caught:
        open_gcs(endpoint, "nowhere/run").probe()
    assert "bucket" in caught.value.hint


class Echo(http.server.BaseHTTPRequestHandler):
    """Refuses everything, and says aloud with which credentials it was asked."""

    def refuse(self):
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        said = self.headers.get("Authorization", "nothing").split()[-1]
        type(self).seen.append(said)
        body = json.dumps({"error": {"code": 403, "message": f"{said} may not do this, nor may <{said}>"}}).encode()
        self.send_response(403)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST = do_PUT = do_DELETE = refuse
    seen: ClassVar[list[str]] = []

    def log_message(self, *args):
        pass


def test_what_gcs_refuses_is_said_without_the_secrets_that_it_repeats(capfd, caplog):
    from google.oauth2.credentials import Credentials

    caplog.set_level("DEBUG")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Echo) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        token = Credentials(SECRET)
        try:
            store = open_gcs(f"http://127.0.0.1:{server.server_port}", "bucket/run", token=token)
            with pytest.raises(StorageError, match=r"writing gs://bucket/run/\.probe-.* failed") as caught:
                store.probe()
        finally:
            server.shutdown()
    assert SECRET in Echo.seen  # it went out, and came back
    assert "may not do this" in str(caught.value)
    said = capfd.readouterr()
    assert "Traceback" not in said.err
    assert SECRET not in str(caught.value) + caught.value.hint + said.out + said.err + caplog.text


def test_an_endpoint_that_is_dead_or_silent_is_told_soon():
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with socket.create_server(("127.0.0.1", 0)) as silent:
        for endpoint in (port, silent.getsockname()[1]):
            options = {"endpoint_url": f"http://127.0.0.1:{endpoint}", "token": "anon", "project": "p"}
            began = time.monotonic()
            with pytest.raises(StorageError, match="not answering"):
                Store.open("gs://bucket/run", options, patience_s=2, stall_s=1).probe()
            assert time.monotonic() - began < 8
