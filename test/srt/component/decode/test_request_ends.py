"""The end of a request in its tokenizer, by any cause; and which requests an abort ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from types import SimpleNamespace
from typing import Any

import pytest

from component.decode.decoder import Decoder
from component.decode.steps import finish, land, tick
from component.decode.test_images import build, receive
from component.decode.test_unserved import FIELDS, Tokenizer
from sglang.srt.disaggregation.delta.prefill.yielded import empty_answer
from sglang.srt.lora.lora_registry import LoRARef, LoRARegistry
from sglang.srt.managers import tokenizer_manager
from sglang.srt.managers.io_struct import AbortReq, GenerateReqInput
from sglang.srt.managers.tokenizer_manager import TokenizerManager


class Serving(Tokenizer):
    """A tokenizer with schedulers that a test controls, and one LoRA adapter."""

    def __init__(self) -> None:
        super().__init__("prefill")
        vars(self.server_args).update(
            enable_lora=True,
            max_loaded_loras=None,
            weight_version="",
            skip_tokenizer_init=True,
            speculative_algorithm=None,
            incremental_streaming_output=False,
        )
        self.enable_metrics, self.crash_dump_folder, self.dump_requests_folder = False, "", ""
        self.request_logger.log_finished_request = lambda *_, **__: None
        self.request_metrics_exporter_manager = SimpleNamespace(exporter_enabled=lambda: False)
        self.lora_ref_cache: dict[str, Any] = {}
        adapter = LoRARef(lora_id="1", lora_name="adapter", lora_path="folder")
        self.lora_registry = LoRARegistry([adapter])

    async def _wait_one_response(self, obj: Any, state: Any, request: Any = None) -> Any:
        async for response in TokenizerManager._wait_one_response(self, obj, state, request):
            yield response

    @property
    def aborts(self) -> list[str]:
        """Return the ids of requests that the tokenizer aborted on the schedulers."""
        return [sent.rid for sent in self.sent if isinstance(sent, AbortReq)]

    def running(self) -> list[str]:
        """Return the ids of the sent requests, in order, each once."""
        batches = [sent for sent in self.sent if not isinstance(sent, AbortReq)]
        found = [each.rid for batch in batches for each in getattr(batch, "batch", [batch])]
        self.sent[:] = [sent for sent in self.sent if isinstance(sent, AbortReq)]
        return found

    def output(self, rid: str, reason: dict[str, Any] | None) -> None:
        """Answer from the schedulers; without a reason, more answers follow."""
        batch = empty_answer(rid)
        batch.finished_reasons = [reason]
        self._handle_batch_output(batch)


def finished(tokenizer: Serving, rid: str) -> None:
    tokenizer.output(rid, {"type": "length", "length": 0})


def failed(tokenizer: Serving, rid: str) -> None:
    tokenizer.output(rid, {"type": "abort", "status_code": 503, "message": "full"})


def aborted(tokenizer: Serving, rid: str) -> None:
    """Answer as for a queued request."""
    tokenizer._handle_abort_req(AbortReq(rid=rid))


def aborted_too_late(tokenizer: Serving, rid: str) -> None:
    finished(tokenizer, rid)
    aborted(tokenizer, rid)


def request(**fields: Any) -> GenerateReqInput:
    params = {"max_new_tokens": 4, **fields.pop("sampling", {})}
    return GenerateReqInput(sampling_params=params, lora_path="adapter", **FIELDS | fields)


async def asked(tokenizer: Serving, obj: Any, end: Callable[[Serving, str], None]) -> None:
    """Send a client's request, which the schedulers end by ``end``."""

    async def client() -> None:
        try:
            async with aclosing(tokenizer.generate_request(obj)) as responses:
                async for _ in responses:
                    pass
        except Exception:
            return  # a client's error

    task = asyncio.create_task(client())
    for _ in range(200):
        await asyncio.sleep(0)
        for rid in tokenizer.running():
            end(tokenizer, rid)
    assert task.done()


async def check_nothing_left(tokenizer: Serving) -> None:
    """Check that a shutdown waits for no request, and that the adapter can be unloaded."""
    await tokenizer.lora_registry.unregister("adapter")
    await asyncio.wait_for(tokenizer.lora_registry.wait_for_unload("1"), 60)
    assert tokenizer.rid_to_state == {}


@pytest.fixture(autouse=True)
def no_media(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace SGLang's search for shared images, which needs the arguments of a running server."""
    monkeypatch.setattr(tokenizer_manager, "wrap_shm_features", lambda tokenized: tokenized)


@pytest.mark.hazard("abort-leaves-something")
@pytest.mark.parametrize("end", [finished, failed, aborted, aborted_too_late])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"stream": True},
        {"top_logprobs_num": -1},  # refused
        {"sampling": {"n": 2}},
        {"input_ids": [[3], [2]], "rid": ["a", "b"]},
    ],
)
def test_a_request_ends(fields: dict[str, Any], end: Callable[[Serving, str], None]) -> None:
    """Guards against a server that never ends, an id that is refused for ever, and an adapter that
    is never unloaded: SGLang keeps the state of some requests, and counts some uses once too often
    or not at all."""

    async def life() -> None:
        tokenizer = Serving()
        for _ in range(2):
            await asked(tokenizer, request(**fields), end)
            assert tokenizer.rid_to_state == {}
        await check_nothing_left(tokenizer)

    asyncio.run(life())


def test_the_client_of_samples_leaves() -> None:
    """Guards against samples that run to their end for a client that has left, and against an
    adapter that is unloaded while they run: SGLang aborts ids that they do not have."""

    async def life() -> None:
        tokenizer = Serving()
        responses = tokenizer.generate_request(request(stream=True, sampling={"n": 2}))
        first = asyncio.create_task(anext(responses))
        await asyncio.sleep(0)
        for _ in range(200):
            await asyncio.sleep(0)
            if len(samples := tokenizer.running()) == 2:
                break
            for rid in samples:  # the prompt
                finished(tokenizer, rid)
        tokenizer.output(samples[0], None)
        await first
        await responses.aclose()
        assert sorted(tokenizer.aborts) == sorted(samples)
        await tokenizer.lora_registry.unregister("adapter")
        unloaded = asyncio.create_task(tokenizer.lora_registry.wait_for_unload("1"))
        await asyncio.sleep(0)
        assert not unloaded.done()
        for rid in samples:
            finished(tokenizer, rid)
        await asyncio.wait_for(unloaded, 60)
        assert tokenizer.rid_to_state == {}

    asyncio.run(life())


def queued(decoder: Decoder, *reqs: Any) -> None:
    """Keep the requests waiting for memory."""


def in_transfer(decoder: Decoder, *reqs: Any) -> None:
    tick(decoder)


def running(decoder: Decoder, *reqs: Any) -> None:
    tick(decoder)
    land(decoder, *reqs)
    decoder.tick_batch()


@pytest.mark.hazard("abort-of-others")
@pytest.mark.parametrize("stage", [queued, in_transfer, running])
def test_an_id_that_another_begins_with(stage: Callable[..., None]) -> None:
    """Guards against a client whose disconnect ends other clients' requests: SGLang compares the
    beginnings of ids, and a client may choose a short one."""
    decoder = build(None)
    first, second = (receive(decoder, [number] * 40, new=4) for number in (1, 2))
    stage(decoder, first, second)
    decoder.abort("r0000")
    decoder.abort("")
    decoder.abort("r00000")
    finish(decoder)
    ends = {req.rid: req.finished_reason.to_json()["type"] for req in (first, second)}
    assert ends == {"r00000": "abort", "r00001": "length"}
