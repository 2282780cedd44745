"""A prefill and a decode server that generate no tokens but those of a bank, over real HTTP."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from aiohttp import web

from benchmark.harness.checks import Load
from chaos.bank import Bank
from chaos.clients import Addresses

TOKEN_S = 0.01
"""Seconds for each token."""


class FakePair:
    """Stands in for ``chaos.servers.Servers``; a context manager.

    ``tamper`` is given each answer (request body, expected tokens) and returns what to say instead.
    """

    def __init__(
        self, bank: Bank, tamper: Callable[[dict[str, Any], list[int]], Any] | None = None
    ) -> None:
        self._answers = {question.prompt: list(question.answer) for question in bank.questions}
        self._tamper = tamper or (lambda body, tokens: tokens)
        self.aborted: set[str] = set()
        self.seen: list[tuple[str, dict[str, Any]]] = []
        """Every request: the role, and the body."""
        self.done: list[str] = []
        """What was done to the servers."""
        self.gone = 0
        """Requests whose client went away."""
        self.held = 0
        self.incarnations: list[Any] = []
        self.master: FakeMaster | None = None
        self.staged: Counter[str] = Counter()
        self.stuck = False
        """Whether the stage keeps a page."""
        self.turns: Counter[tuple[str, ...]] | None = None
        """Turns by side and reason, where decode computes some."""

    def __enter__(self) -> FakePair:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._runners: list[web.AppRunner] = []
        urls = [self._call(self._serve(role)) for role in ("decode", "prefill")]
        self.addresses = Addresses(*urls, "127.0.0.1", 1)
        return self

    def __exit__(self, *error: object) -> None:
        for runner in self._runners:
            self._call(runner.cleanup())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _call(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(20)

    async def _serve(self, role: str) -> str:
        app = web.Application()

        async def generate(request: web.Request) -> web.StreamResponse:
            return await self._generate(role, request)

        async def abort(request: web.Request) -> web.Response:
            body = await request.json()
            self.seen.append((f"abort {role}", body))
            running = {said["rid"] for _, said in self.seen if "rid" in said}
            self.aborted |= running if body.get("abort_all") else {body["rid"]}
            return web.Response()

        app.router.add_post("/generate", generate)
        app.router.add_post("/abort_request", abort)
        for name in ("flush_cache", "pause_generation", "continue_generation"):
            app.router.add_post(f"/{name}", self._control(name, role))
        runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self._runners.append(runner)
        return "http://{}:{}".format(*runner.addresses[0][:2])

    def _control(self, name: str, role: str) -> Callable[[web.Request], Any]:
        async def control(request: web.Request) -> web.Response:
            body = await request.json()
            self.done.append(" ".join([name, *body.values(), "on", role]))
            return web.Response()

        return control

    async def _generate(self, role: str, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.seen.append((role, body))
        tokens = self._answers[tuple(body["input_ids"])]
        tokens = self._tamper(body, tokens) if role == "decode" else tokens[:1]
        response = web.StreamResponse()
        await response.prepare(request)
        try:
            if tokens == "hang":
                await asyncio.sleep(60)
            for count in range(1, len(tokens) + 1):
                await asyncio.sleep(TOKEN_S)
                last = count == len(tokens)
                finish = {"type": "length"} if last else None
                if body["rid"] in self.aborted:
                    finish, last = {"type": "abort", "message": "Aborted"}, True
                await self._write(response, tokens[:count], finish)
                if last:
                    break
        except (asyncio.CancelledError, ConnectionError):
            self.gone += 1
            raise
        await response.write(b"data: [DONE]\n\n")
        return response

    async def _write(
        self, response: web.StreamResponse, tokens: list[int], finish: dict[str, str] | None
    ) -> None:
        meta = {"completion_tokens": len(tokens), "prompt_tokens": 1, "cached_tokens": 0}
        event = {"output_ids": tokens, "meta_info": {**meta, "finish_reason": finish}}
        await response.write(b"data: %s\n\n" % json.dumps(event).encode())

    # ---- as chaos.servers.Servers ----

    def start(self, role: str) -> float:
        self.done.append(f"start {role}")
        return 0.1

    def kill(self, role: str) -> None:
        self.done.append(f"kill {role}")

    def pause(self, role: str, *, scheduler_only: bool = False) -> list[int]:
        self.done.append(f"pause {role}" + (" scheduler" if scheduler_only else ""))
        return [17]

    def resume(self, pids: list[int]) -> None:
        self.done.append(f"resume {pids}")

    def dead(self) -> list[Any]:
        return []

    def settle(self, timeout_s: float) -> dict[str, Load]:
        self.done.append("settle")
        return {"decode": Load(0, self.held), "prefill": Load(0, 0)}

    def log_sizes(self) -> dict[str, int]:
        return {"decode": 5}

    def wait_balanced(self, since: dict[str, int]) -> None:
        assert since == {"decode": 5}
        self.done.append("balanced")

    def count_staged(self) -> Counter[str]:
        return self.staged

    def count_turns(self) -> Counter[tuple[str, ...]] | None:
        return self.turns

    def wait_drained(self) -> None:
        if self.stuck:
            raise TimeoutError("the stage holds a page")

    def flush(self) -> None:
        self.done.append("flush")


class FakeMaster:
    """Stands in for ``Master``; what is done to it is noted in ``done``."""

    def __init__(self, done: list[str]) -> None:
        self._done = done

    def start(self) -> None:
        self._done.append("start store")

    def kill(self) -> None:
        self._done.append("kill store")

    def freeze(self) -> None:
        self._done.append("stop store")

    def thaw(self) -> None:
        self._done.append("continue store")


def incarnation(log: Any, killed_at: int | None = None) -> Any:
    """What ``Chaos`` reads of an incarnation."""
    return SimpleNamespace(process=SimpleNamespace(log=log), killed_at=killed_at)
