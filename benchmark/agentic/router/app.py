"""The router as an aiohttp application: its routes, and what lives as long as it does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from benchmark.agentic.router import health
from benchmark.agentic.router.body import PATHS
from benchmark.agentic.router.health import UPSTREAM_ERRORS, reason
from benchmark.agentic.router.proxy import Proxy, failure
from benchmark.agentic.router.schedule import DecisionLog, Scheduler
from benchmark.agentic.router.settings import Settings
from benchmark.agentic.router.state import PREFILL, Worker

_PASSED_ON = ("/v1/models", "/model_info", "/get_model_info")
_ADMIN_TIMEOUT = aiohttp.ClientTimeout(total=60)


class Router:
    """One router. Serve ``app`` with ``handler_cancellation=True``, so that a client that
    disconnects ends its request."""

    def __init__(self, settings: Settings, decisions: Path | None = None) -> None:
        self.settings, self._decisions = settings, decisions
        self.scheduler = Scheduler(settings)
        self.app = web.Application(client_max_size=settings.max_body_bytes)
        self.app.cleanup_ctx.append(self._run)
        routes = [web.post(path, self._generate) for path in PATHS]
        routes += [web.get(path, self._pass_on) for path in _PASSED_ON]
        routes += [web.get(path, self._ready) for path in ("/health", "/readiness")]
        routes += [
            web.get(path, self._server_info) for path in ("/server_info", "/get_server_info")
        ]
        routes += [web.route("*", "/flush_cache", self._flush_cache)]
        routes += [web.get("/workers", self._workers)]
        self.app.add_routes(routes)

    async def _run(self, app: web.Application) -> AsyncIterator[None]:
        """The life of what a running router has: connections, health checks, the log."""
        settings = self.settings
        log = DecisionLog(self._decisions) if self._decisions is not None else None
        # Less than SGLang's 5 s: a request must not meet a connection that is just being closed.
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=3.0)
        async with aiohttp.ClientSession(connector=connector, auto_decompress=False) as session:
            self._session = session
            self._proxy = Proxy(self.scheduler, session, log)
            watches = [
                asyncio.create_task(health.watch(worker, session, settings))
                for worker in self.scheduler.workers
            ]
            yield
            for watch in watches:
                watch.cancel()
            await asyncio.gather(*watches, return_exceptions=True)
            await self._proxy.close()
        if log is not None:
            log.close()

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        return await self._proxy.handle(request)

    async def _ready(self, request: web.Request) -> web.Response:
        """200 once every worker was looked at and a request would find one, else 503."""
        workers = self.scheduler.workers
        ready = self.scheduler.can_serve and all(worker.checked for worker in workers)
        states = {worker.url: "up" if worker.up else "out" for worker in workers}
        return web.json_response(states, status=200 if ready else 503)

    async def _workers(self, request: web.Request) -> web.Response:
        """What the router believes of each worker."""
        return web.json_response([worker.state() for worker in self.scheduler.workers])

    async def _pass_on(self, request: web.Request) -> web.Response:
        """To the first worker that is up: what all of them answer alike."""
        for worker in self.scheduler.workers:
            if worker.up:
                try:
                    status, body = await self._ask(worker, "GET", request.path)
                except UPSTREAM_ERRORS as error:
                    return failure(502, f"{worker.role} worker {worker.url}: {reason(error)}")
                return web.Response(body=body, status=status, content_type="application/json")
        return failure(503, "no worker is up")

    async def _server_info(self, request: web.Request) -> web.Response:
        """Each worker's own, by role; ``internal_states`` are those of the workers that decode."""
        workers = [worker for worker in self.scheduler.workers if worker.up]
        infos = await asyncio.gather(*(self._info(worker) for worker in workers))
        answer: dict[str, list[Any]] = {"internal_states": []}
        for worker, info in zip(workers, infos, strict=True):
            answer.setdefault(worker.role, []).append(info)
            if worker.role != PREFILL:
                answer["internal_states"] += info.get("internal_states", [])
        return web.json_response(answer)

    async def _info(self, worker: Worker) -> dict[str, Any]:
        try:
            async with self._session.get(
                worker.url + "/server_info", timeout=_ADMIN_TIMEOUT
            ) as answer:
                info: dict[str, Any] = await answer.json(content_type=None)
                return info
        except (*UPSTREAM_ERRORS, ValueError) as error:
            return {"url": worker.url, "error": reason(error)}

    async def _flush_cache(self, request: web.Request) -> web.Response:
        """All workers' caches, and what we believe of those that did it; after all of them, where
        sessions went."""
        workers = self.scheduler.workers
        done: Sequence[tuple[int, bytes] | BaseException] = await asyncio.gather(
            *(self._ask(worker, "POST", request.path_qs) for worker in workers),
            return_exceptions=True,
        )
        said: dict[str, str] = {}
        for worker, result in zip(workers, done, strict=True):
            if isinstance(result, BaseException):
                said[worker.url] = reason(result)
            else:
                said[worker.url] = str(result[0])
                if result[0] == 200:
                    worker.index.clear()
        fine = all(text == "200" for text in said.values())
        if fine:
            self.scheduler.forget_sessions()
        return web.json_response(said, status=200 if fine else 502)

    async def _ask(self, worker: Worker, method: str, path: str) -> tuple[int, bytes]:
        async with self._session.request(
            method, worker.url + path, timeout=_ADMIN_TIMEOUT
        ) as answer:
            return answer.status, await answer.read()
