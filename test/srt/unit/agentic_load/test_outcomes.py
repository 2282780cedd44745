"""Times of tokens, request classes, and events of a stream."""

from __future__ import annotations

import json

import orjson
import pytest

from benchmark.agentic.load.outcome import HEAVY, MEDIUM, WARM, Classes, gaps
from benchmark.agentic.load.prepare import Endpoint, PromptSource, body
from benchmark.harness.stream import Failed, Result, take
from benchmark.traces.record import Record


def event(total: int, reason: object = None, **more: object) -> bytes:
    meta = {"completion_tokens": total, "prompt_tokens": 9, "cached_tokens": 4}
    return json.dumps({"meta_info": {**meta, "finish_reason": reason}, **more}).encode()


def test_tokens_that_come_together_share_their_gap() -> None:
    """Guards against gaps of 0 s for tokens that a server merged into one event, which would make
    it look faster the more it merges, and against a TPOT of 0 s for an answer in one piece."""
    assert gaps([1.0, 1.3, 1.4], [2, 5, 6]) == pytest.approx((0.1, 0.1, 0.1, 0.1))
    assert gaps([1.0], [3]) == gaps([], []) == ()


def test_events_count_tokens_once() -> None:
    """Guards against times for events without new tokens, such as the last event."""
    answer = Result("", 0.0)
    take(answer, event(1, output_ids=[5]), 1.0)
    take(answer, event(3, output_ids=[5, 6, 7]), 2.0)
    take(answer, event(3, {"type": "length", "length": 3}), 3.0)
    assert (answer.token_times, answer.totals, answer.ended) == ([1.0, 2.0], [1, 3], True)
    assert (answer.prompt_tokens, answer.cached_tokens) == (9, 4)


@pytest.mark.parametrize(
    ("data", "kind", "text"),
    [
        (event(1, {"type": "abort", "message": "no memory"}), "abort", "no memory"),
        (b'{"error": {"message": "too long"}}', "abort", "too long"),
        (b'{"choices":[{"text":"","finish_reason":"abort"}]}', "abort", "aborted"),
        (b'{"meta_info": {"compl', "broken_stream", "unreadable"),
        (b'{"meta_info": {"prompt_tokens": 3}}', "broken_stream", "completion_tokens"),
    ],
)
def test_events_that_are_errors(data: bytes, kind: str, text: str) -> None:
    """Guards against a server's refusal, or invalid data, taken for part of an answer."""
    with pytest.raises(Failed, match=text) as failure:
        take(Result("", 0.0), data, 1.0)
    assert failure.value.kind == kind


def test_openai_chunks_are_counted_by_usage() -> None:
    """Guards TPOT on OpenAI's endpoints: token counts come from `usage`, since one piece may hold
    several tokens; the chunk with `usage` may follow the end."""
    answer = Result("", 0.0)
    take(answer, b'{"choices":[{"delta":{"role":"assistant"}}]}', 0.5)
    take(answer, b'{"choices":[{"delta":{"content":"a"}}]}', 1.0)
    take(answer, b'{"choices":[{"delta":{"content":"b c"},"finish_reason":"length"}]}', 2.0)
    assert (answer.token_times, answer.totals, answer.ended) == ([1.0, 2.0], [1, 2], True)
    usage = {"prompt_tokens": 9, "completion_tokens": 5}
    usage_line = {"choices": [], "usage": {**usage, "prompt_tokens_details": {"cached_tokens": 4}}}
    take(answer, json.dumps(usage_line).encode(), 2.1)
    assert (answer.token_times, answer.totals) == ([1.0, 2.0], [1, 5])
    assert (answer.prompt_tokens, answer.cached_tokens) == (9, 4)


@pytest.mark.parametrize(
    ("classes", "new_tokens", "expected"),
    [
        # The borders that the field uses.
        (Classes(), 0, WARM),
        (Classes(), 4_999, WARM),
        (Classes(), 5_000, MEDIUM),
        (Classes(), 20_000, MEDIUM),
        (Classes(), 20_001, HEAVY),
        # A trace scaled from blocks of 512 to 16 tokens keeps its classes.
        (Classes().scaled(16), 5 * 16, WARM),
        (Classes().scaled(16), 15 * 16, MEDIUM),
        (Classes().scaled(16), 60 * 16, HEAVY),
    ],
)
def test_class_of_a_request(classes: Classes, new_tokens: int, expected: str) -> None:
    """Guards against requests that move between classes at their borders or by a scale."""
    assert classes.of(new_tokens) == expected


@pytest.mark.parametrize("endpoint", ["generate", "completions", "chat"])
def test_bodies_ask_for_the_recorded_length(endpoint: Endpoint) -> None:
    """Guards against arms that do different work: fixed length, greedy and streamed; and against
    endpoints other than SGLang's without `usage`, which counts the tokens."""
    source = PromptSource(range(100), 4, endpoint=endpoint, model="m")
    prompts, record = source.make(), Record(0, 6, 3, (1, 2))
    sent = orjson.loads(body(prompts, record, source))
    assert sent["stream"] is True
    if endpoint == "generate":
        sampling = {"temperature": 0, "max_new_tokens": 3, "ignore_eos": True}
        assert (sent["input_ids"], sent["sampling_params"]) == (prompts.prompt(record), sampling)
        return
    assert (sent["model"], sent["max_tokens"], sent["ignore_eos"]) == ("m", 3, True)
    assert sent["stream_options"]["include_usage"] is True
    prompt = sent["prompt"] if endpoint == "completions" else sent["messages"][0]["content"].split()
    assert len(prompt) == 6
