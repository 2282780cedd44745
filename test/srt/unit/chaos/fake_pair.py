"""A prefill and a decode server that generate no tokens but those of a bank, over real HTTP."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from collections.abc import Callable
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
        self.held = 0
        """Tokens that decode keeps."""
        self.incarnations: list[Any] = []
        self.died: list[Any] = []
        """Servers that ended by themselves."""
        self.started: list[str] = []
        self.master: Any = None
        self.staged: Counter[str] = Counter()
        self.stuck = self.unbalanced = False
        """Whether the stage keeps a page; whether a server never says that its invariants hold."""
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
        runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self._runners.append(runner)
        return "http://{}:{}".format(*runner.addresses[0][:2])

    async def _generate(self, role: str, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.seen.append((role, body))
        tokens = self._answers[tuple(body["input_ids"])]
        tokens = self._tamper(body, tokens) if role == "decode" else tokens[:1]
        response = web.StreamResponse()
        await response.prepare(request)
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
        self.started.append(role)
        return 0.1

    def dead(self) -> list[Any]:
        return [one for one in self.died if one.killed_at is None]

    def settle(self, timeout_s: float) -> dict[str, Load]:
        return {"decode": Load(0, self.held), "prefill": Load(0, 0)}

    def log_sizes(self) -> dict[str, int]:
        return {"decode": 5}

    def wait_balanced(self, since: dict[str, int]) -> None:
        if self.unbalanced:
            raise TimeoutError(f"{since} is all that was logged")

    def count_staged(self) -> Counter[str]:
        return self.staged

    def count_turns(self) -> Counter[tuple[str, ...]] | None:
        return self.turns

    def wait_drained(self) -> None:
        if self.stuck:
            raise TimeoutError("the stage holds a page")

    def flush(self) -> None:
        """Nothing is held."""
