"""Explanations of requests: where they were computed and why, what they hit, how they waited."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from component.decode.decoder import Decoder
from component.decode.stages import FROM_PREFILL, HERE, bring_to, fail_room, options
from component.decode.steps import PROMPT, admit, finish, ids, land, serve, tick
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.delta.decode.request import Explanation
from sglang.srt.disaggregation.delta.observability import event_log
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.patchset.environment import EVENT_LOG, EXPLAIN

#: Bytes of a page of 16 tokens in the pools of ``Decoder``, and tokens of the prompt.
PAGE_BYTES, LENGTH = 2 * 16 * 16, len(PROMPT)


class Answered(Decoder):
    """A decode server with one clock for queues and stages; it keeps SGLang's outputs."""

    def __init__(self, *sizes: int, **options: Any) -> None:
        super().__init__(*sizes, **options)
        #: Request id -> ``cached_tokens_details`` of each part of its answer.
        self.details: dict[str, list[Any]] = {}
        self.attn_tp_rank, self.dp_rank, self.stream_interval = 0, None, 1
        self.server_args.enable_request_time_stats_logging = False
        self.send_to_detokenizer = SimpleNamespace(send_output=self._keep)

    def get_load(self, _: Any = None) -> Any:
        """Return an empty load: these tests do not read loads."""
        return SimpleNamespace(num_reqs=0, num_waiting_reqs=0, num_tokens=0)

    def _keep(self, output: Any) -> None:
        for rid, details in zip(output.rids, output.cached_tokens_details, strict=True):
            self.details.setdefault(rid, []).append(details)

    def stream_output(self, reqs: list[Any], *arguments: Any, **options: Any) -> None:
        super().stream_output(reqs)
        self.stream_output_generation(reqs, False)

    def explained(self, req: Any) -> dict[str, Any]:
        """Return what the last part of an answer says of ``req``, without SGLang's keys."""
        details = self.details[req.rid][-1] or {}
        return {key: value for key, value in details.items() if key not in ("device", "host")}


@pytest.fixture
def decoder(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Answered:
    options = getattr(request, "param", {})
    decoder = Answered(16, 1024, **options)
    monkeypatch.setattr(Explanation, "clock", lambda: decoder.now)
    return decoder


def test_a_remote_turn_and_its_hit(decoder: Answered) -> None:
    """Guards against an explanation that counts the tokens of another stage or request, and against
    times of a stage that is not over."""
    first = decoder.submit(PROMPT, new=4, ready=False)
    decoder.now += 1
    decoder.room(first).state = KVPoll.WaitingForInput
    tick(decoder)
    decoder.now += 2
    land(decoder, first)
    decoder.now += 3
    finish(decoder)
    remote = {"turn": "remote", "local_tokens": 0}
    assert decoder.explained(first) == {
        **remote,
        "decode_hit_tokens": 0,
        "requested_tokens": LENGTH,
        "requested_bytes": LENGTH // 16 * PAGE_BYTES,
        **{"handshake_ms": 1000, "memory_ms": 0, "transfer_ms": 2000, "start_ms": 3000},
    }
    (second,) = serve(decoder, [*PROMPT, *[1] * 16], new=4)
    assert decoder.explained(second) == {
        **remote,
        "decode_hit_tokens": LENGTH,
        "requested_tokens": 16,
        "requested_bytes": PAGE_BYTES,
        **{"handshake_ms": 0, "memory_ms": 0, "transfer_ms": 0, "start_ms": 0},
    }


@pytest.mark.parametrize("decoder", [{"local": 40, "chunk": 16}], indirect=True)
def test_a_local_turn(decoder: Answered) -> None:
    """Guards against a local turn that is explained as remote, and against tokens that were
    computed here and count as requested; also against a long turn without its reason."""
    (long,) = serve(decoder, PROMPT)
    found = decoder.explained(long)
    assert (found["turn"], found["turn_reason"]) == ("remote", "long")
    short = decoder.submit([*PROMPT, *[1] * 24], new=4)
    tick(decoder)
    decoder.now += 2
    finish(decoder)
    assert decoder.explained(short) == {
        **{"turn": "local", "turn_reason": "short"},
        **{"decode_hit_tokens": LENGTH, "local_tokens": 24},
        **{"requested_tokens": 0, "requested_bytes": 0},
        **{"handshake_ms": 0, "memory_ms": 0, "local_prefill_ms": 2000, "start_ms": 0},
    }


@pytest.mark.parametrize("decoder", [{"lost": 100}], indirect=True)
def test_a_turn_whose_transfer_failed(decoder: Answered) -> None:
    """Guards against bytes of a failed transfer that pass for received ones, and against its time
    that counts as a wait for memory."""
    (req,) = admit(decoder, PROMPT, new=4)
    decoder.now += 5
    fail_room(decoder, req)
    finish(decoder)
    found = decoder.explained(req)
    assert (found["turn"], found["turn_reason"]) == ("local", "transfer_failed")
    assert (found["local_tokens"], found["requested_bytes"]) == (LENGTH, 0)
    assert (found["transfer_ms"], found["memory_ms"]) == (5000, 0)


def test_a_wait_for_memory(decoder: Answered) -> None:
    """Guards against a request that waited and does not say for what."""
    (big,) = admit(decoder, ids(1, 960), new=4)
    small = decoder.submit(ids(2, 200), new=4)
    tick(decoder)
    assert small in decoder.queued
    decoder.now += 4
    finish(decoder)
    found = decoder.explained(small)
    assert (found["memory_ms"], found["refused_for"]) == (4000, "no_tokens")
    assert "refused_for" not in decoder.explained(big)


def test_a_retraction(decoder: Answered) -> None:
    """Guards against the wait after a retraction that is added to another one."""
    req = bring_to(decoder, "retracted")
    decoder.now += 7
    finish(decoder)
    found = decoder.explained(req)
    assert (found["memory_ms"], found["retracted_ms"], found["turn"]) == (0, 7000, "remote")


def test_only_the_end_of_an_answer_is_explained(
    decoder: Answered, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a cost and bytes in each part of a stream, and against a variable that does
    not turn it off."""
    req = decoder.submit(PROMPT, new=4)
    req.stream = True
    finish(decoder)
    parts = decoder.details[req.rid]
    assert len(parts) == 4 and parts[:3] == [None] * 3
    assert (parts[3]["device"], parts[3]["host"], parts[3]["turn"]) == (0, 0, "remote")
    monkeypatch.setenv(EXPLAIN.name, "0")
    other = Answered(16, 1024)
    (req,) = serve(other, PROMPT)
    assert other.details[req.rid] == [None]


def test_an_error_is_explained_as_far_as_the_request_came(decoder: Answered) -> None:
    """Guards against a scheduler that ends because a request that was never admitted ends."""
    req = decoder.submit(PROMPT, ready=False)
    tick(decoder)
    fail_room(decoder, req)
    tick(decoder)
    assert decoder.explained(req) == {"handshake_ms": 0}
    finish(decoder)


# ---- event log ----


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """Return a function that returns the events of decode so far."""
    monkeypatch.setenv(EVENT_LOG.name, str(tmp_path))
    event_log.cache_clear()

    def read() -> list[dict[str, Any]]:
        (log,) = tmp_path.glob("decode-*.jsonl")
        return [json.loads(line) for line in log.read_text().splitlines()]

    yield read
    event_log.cache_clear()


@pytest.mark.parametrize("decoder", [{"local": 40, "chunk": 16}], indirect=True)
def test_the_event_log_has_local_turns(decoder: Answered, events: Any) -> None:
    """Guards against a log in which local turns are missing, so that a request that is not there
    was either local or lost."""
    (long,) = serve(decoder, PROMPT)
    (short,) = serve(decoder, [*PROMPT, *[1] * 24], new=4)
    lines = events()
    kinds = {
        rid: [line["type"] for line in lines if line.get("rid") == rid] for rid in decoder.details
    }
    assert kinds == {long.rid: ["admitted", "ended"], short.rid: ["local", "computed", "ended"]}
    assert [line["reason"] for line in lines if "reason" in line] == ["long", "short"]
    taken, ended = lines[2], lines[4]
    assert (taken["prompt_tokens"], taken["prefix_tokens"]) == (LENGTH + 24, LENGTH)
    assert (taken["room"], ended["room"]) == (short.bootstrap_room,) * 2
    assert (ended["finish"], ended["error"]) == ("length", "")
    assert ended["explanation"] == decoder.explained(short)


@pytest.mark.parametrize(
    ("stage", "decoder"),
    [(stage, options(stage)) for stage in (*FROM_PREFILL, *HERE)],
    indirect=["decoder"],
)
def test_the_event_log_has_the_end_of_aborted_requests(
    decoder: Answered, events: Any, stage: str
) -> None:
    """Guards against a client's disconnect that looks like a lost request."""
    req = bring_to(decoder, stage)
    decoder.abort(req.rid)
    finish(decoder)
    (ended,) = (line for line in events() if line["type"] == "ended" and line["rid"] == req.rid)
    assert ended["finish"] == "abort"


# ---- spans ----


class Trace:
    """SGLang's trace of a request, as its time statistics see it; keeps added spans."""

    tracing_enable = True

    def __init__(self) -> None:
        self.spans: list[Any] = []

    def trace_slice(self, span: Any) -> None:
        self.spans.append(span)

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


@pytest.mark.parametrize("decoder", [{"local": 40, "chunk": 16}], indirect=True)
def test_spans(decoder: Answered) -> None:
    """Guards against a trace in which the handshake, the wait for memory, the transfer or the local
    chunks cannot be told apart."""

    def spans(tokens: list[int]) -> dict[str, tuple[float, dict[str, Any]]]:
        req = decoder.submit(tokens, ready=False, new=4)
        req.time_stats.disagg_mode = DisaggregationMode.DECODE
        req.time_stats.trace_ctx = trace = Trace()
        decoder.now += 1
        decoder.room(req).state = KVPoll.WaitingForInput
        tick(decoder)
        decoder.now += 2
        finish(decoder)
        return {
            span.slice_name: ((span.end_time_ns - span.start_time_ns) / 1e9, span.attrs)
            for span in trace.spans
            if span.slice_name.startswith("disagg_")
        }

    remote = spans(PROMPT)
    seconds = {name: round(length, 3) for name, (length, _) in remote.items()}
    assert seconds == {
        **{"disagg_handshake": 1, "disagg_memory": 0, "disagg_transfer": 2, "disagg_start": 0}
    }
    assert remote["disagg_transfer"][1]["requested_tokens"] == LENGTH
    local = spans([*PROMPT, *[1] * 24])
    assert round(local["disagg_local_prefill"][0], 3) == 2
    assert local["disagg_local_prefill"][1]["turn_reason"] == "short"
    assert "disagg_transfer" not in local
