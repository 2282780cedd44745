"""The replay against small servers of our own."""

from __future__ import annotations

import asyncio
import json

from aiohttp import web

from benchmark.hicache_buffer_only.replay import Replayed, replay
from benchmark.traces.prompts import Prompts
from benchmark.traces.record import Record

PROMPTS = Prompts(range(100), block_tokens=4)


def serve(records: list[Record], gate: int) -> tuple[Replayed, list[list[dict[str, object]]]]:
    """Replays over two servers that answer nobody before they have ``gate`` requests together."""
    bodies: list[list[dict[str, object]]] = [[], []]

    async def go() -> Replayed:
        arrived = asyncio.Semaphore(0)
        everybody = asyncio.Event()

        def handler(server: int):  # type: ignore[no-untyped-def]
            async def answer(request: web.Request) -> web.Response:
                bodies[server].append(await request.json())
                arrived.release()
                if sum(map(len, bodies)) == gate:
                    everybody.set()
                await everybody.wait()
                meta = {"completion_tokens": 1, "prompt_tokens": 4, "cached_tokens": 0}
                event = {"output_ids": [9], "meta_info": {**meta, "finish_reason": None}}
                return web.Response(text=f"data: {json.dumps(event)}\n\n")

            return answer

        urls, runners = [], []
        for server in range(2):
            app = web.Application()
            app.router.add_post("/generate", handler(server))
            runner = web.AppRunner(app)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            runners.append(runner)
            urls.append("http://{}:{}".format(*runner.addresses[0]))
        try:
            return await asyncio.wait_for(replay(urls, records, PROMPTS), 20)
        finally:
            for runner in runners:
                await runner.cleanup()

    return asyncio.run(go()), bodies


def test_requests_do_not_wait_for_answers() -> None:
    """A closed loop would slow the load down to what the arm can take, and hide its queue: here
    nobody is answered before the last request has arrived."""
    records = [Record(float(i), 3, 1, (i,)) for i in range(6)]
    replayed, bodies = serve(records, gate=6)
    assert [r.error for r in replayed.results] == [None] * 6
    assert [r.label for r in replayed.results] == list("012345")
    assert 0 <= replayed.late_s < 20


def test_workers_take_turns_with_the_prompts_of_the_trace() -> None:
    """Who gets which request must be the same in both arms, and each its own prompt and length."""
    records = [Record(0.0, 3, 1 + i, (i,)) for i in range(4)]
    _, bodies = serve(records, gate=4)
    for server in range(2):
        expected = [(PROMPTS.prompt(r), r.output_length) for r in records[server::2]]
        got = [(b["input_ids"], b["sampling_params"]["max_new_tokens"]) for b in bodies[server]]  # type: ignore[index]
        assert sorted(got) == sorted(expected)
