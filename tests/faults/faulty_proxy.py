"""An HTTP proxy that misbehaves on demand, in front of a real server, over real sockets."""

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass

import aiohttp
from aiohttp import web
from yarl import URL

SLOW_DOWN = (
    b"<?xml version='1.0'?><Error><Code>SlowDown</Code><Message>Please reduce your request rate</Message></Error>"
)
INTERNAL = b"<?xml version='1.0'?><Error><Code>InternalError</Code><Message>We encountered an error</Message></Error>"
DENIED = b"<?xml version='1.0'?><Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"
ANSWERS = {"500": (500, INTERNAL), "503": (503, SLOW_DOWN), "403": (403, DENIED)}


@dataclass(slots=True)
class Fault:
    """What happens to the next `times` requests that match. kinds: 500, 503, 403, reset, stall, short, flip."""

    kind: str
    times: int
    methods: tuple[str, ...]
    within: str

    def matches(self, method: str, path: str) -> bool:
        return self.times > 0 and method in self.methods and self.within in path


class FaultyProxy:
    """Forwards to `target` from a port of its own; use as a context manager."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._faults: list[Fault] = []
        self.log: list[tuple[str, str]] = []
        self.struck = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="faulty-proxy", daemon=True)

    def fault(
        self, kind: str, times: int = 1, methods: tuple[str, ...] = ("GET", "PUT", "POST"), within: str = ""
    ) -> None:
        """The next matching requests fare badly; earlier faults stay in force."""
        self._faults.append(Fault(kind, times, methods, within))

    def calm(self) -> None:
        """From now on all is well."""
        self._faults.clear()
        self.struck = 0
        self.log.clear()

    def __enter__(self) -> "FaultyProxy":
        self._thread.start()
        self.url = asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(10)
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(20)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    async def _start(self) -> str:
        self._session = aiohttp.ClientSession(auto_decompress=False, connector=aiohttp.TCPConnector(limit=64))
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1, auto_decompress=False)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        port = self._runner.addresses[0][1]
        return f"http://127.0.0.1:{port}"

    async def _stop(self) -> None:
        self._faults.clear()
        await self._runner.cleanup()
        await self._session.close()

    def _fault_for(self, method: str, path: str) -> str | None:
        for fault in self._faults:
            if fault.matches(method, path):
                fault.times -= 1
                self.struck += 1
                return fault.kind
        return None

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        path = request.raw_path
        self.log.append((request.method, path))
        kind = self._fault_for(request.method, path)
        assert request.transport is not None
        if kind == "reset":
            request.transport.abort()
            return web.Response()
        if kind == "stall":
            await asyncio.sleep(3600)
        body = await request.read()
        if kind in ANSWERS:
            status, text = ANSWERS[kind]
            return web.Response(status=status, body=text, content_type="application/xml")
        answer = await self._forward(request, body)
        status, headers, data = answer
        if kind == "short":
            return await self._send_half(request, status, headers, data)
        if kind == "flip" and data:
            spoiled = bytearray(data)
            spoiled[len(data) // 2] ^= 0x10
            headers = {k: v for k, v in headers.items() if "checksum" not in k.lower()}
            return web.Response(status=status, headers=headers, body=bytes(spoiled))
        return web.Response(status=status, headers=headers, body=data)

    async def _forward(self, request: web.Request, body: bytes) -> tuple[int, dict[str, str], bytes]:
        headers = {
            k: v for k, v in request.headers.items() if k.lower() not in ("content-length", "connection", "expect")
        }
        url = URL(self._target + request.raw_path, encoded=True)
        async with self._session.request(
            request.method, url, headers=headers, data=body or None, allow_redirects=False
        ) as answer:
            data = await answer.read()
            skip = ("transfer-encoding", "connection", "date", "server")
            found = {k: v for k, v in answer.headers.items() if k.lower() not in skip}
            if request.method != "HEAD":
                found["Content-Length"] = str(len(data))
            return answer.status, found, data

    async def _send_half(
        self, request: web.Request, status: int, headers: dict[str, str], data: bytes
    ) -> web.StreamResponse:
        response = web.StreamResponse(status=status, headers=headers)
        await response.prepare(request)
        await response.write(data[: len(data) // 2])
        assert request.transport is not None
        request.transport.close()
        return response


Options = Callable[[str], dict[str, object]]
