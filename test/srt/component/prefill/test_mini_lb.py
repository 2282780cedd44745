"""SGLang's small load balancer in Python (``--mini-lb``), and prefill's answer to a request that
decode computes itself."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from sglang_router import mini_lb
from sglang_router.router_args import RouterArgs

from component.prefill.test_yielded import Tokenizer, answer_of
from sglang.srt.disaggregation.delta.prefill.yielded import RoomYielded

HERE = {
    "text": "yes",
    "output_ids": [5],
    "meta_info": {
        "input_token_logprobs": [],
        "output_token_logprobs": [[-0.5, 5, None]],
        "completion_tokens": 1,
    },
}


def server(answers: Any) -> TestServer:
    """Return a server whose ``/generate`` sends ``answers(request)``, streamed or not."""

    async def generate(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        text = json.dumps(answers(body))
        if body.get("stream"):
            return web.Response(
                text=f"data: {text}\n\ndata: [DONE]\n\n", content_type="text/event-stream"
            )
        return web.Response(text=text, content_type="application/json")

    app = web.Application()
    app.router.add_post("/generate", generate)
    return TestServer(app)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("logprobs", [False, True])
def test_decode_is_heard(monkeypatch: pytest.MonkeyPatch, stream: bool, logprobs: bool) -> None:
    """Guards against an empty answer that the load balancer cannot parse if log probabilities are
    requested: the client would get an error."""
    rooms = []

    def prefill_answers(body: dict[str, Any]) -> Any:
        rooms.append(body["bootstrap_room"])
        tokenizer = Tokenizer()
        options = {"stream": body["stream"], "return_logprob": logprobs, "top_logprobs_num": 0}
        state = tokenizer.arrive(body["bootstrap_room"], **options)
        tokenizer.take_yielded(RoomYielded(body["bootstrap_room"]))
        return answer_of(state)

    def decode_answers(body: dict[str, Any]) -> Any:
        rooms.append(body["bootstrap_room"])
        return HERE

    async def ask() -> httpx.Response:
        async with server(prefill_answers) as prefill, server(decode_answers) as decode:
            arguments = RouterArgs(
                pd_disaggregation=True,
                prefill_urls=[(str(prefill.make_url("/")).rstrip("/"), 8998)],
                decode_urls=[str(decode.make_url("/")).rstrip("/")],
            )
            monkeypatch.setattr(mini_lb, "lb", mini_lb.MiniLoadBalancer(arguments))
            transport = httpx.ASGITransport(app=mini_lb.app)
            body: dict[str, Any] = {"input_ids": [1, 2, 3], "stream": stream}
            if logprobs:
                body["return_logprob"] = True
            async with httpx.AsyncClient(transport=transport, base_url="http://lb") as client:
                return await client.post("/generate", json=body)

    answer = asyncio.run(ask())
    assert answer.status_code == 200
    text = answer.text.removeprefix("data:").split("\n\n")[0] if stream else answer.text
    assert json.loads(text) == HERE
    assert len(rooms) == 2 and rooms[0] == rooms[1]
