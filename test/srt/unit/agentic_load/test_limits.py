"""Open files, bodies, and the stub that other tests rely on."""

from __future__ import annotations

import resource

import orjson
import pytest

from benchmark.agentic.load import run
from benchmark.agentic.load.prepare import Endpoint, PromptSource, body
from benchmark.traces.record import Record
from component.agentic.stub import PrefixCache


def test_the_limit_is_raised_or_the_reason_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against connections refused by our own system, which would count as the server's."""
    raised = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 1000))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limit: raised.append(limit))
    assert run.raise_open_files(400) == 1000
    assert raised == [(1000, 1000)]
    with pytest.raises(OSError, match="900 streams need 1864 open files"):
        run.raise_open_files(900)


def test_bodies_ask_for_the_recorded_length() -> None:
    """Guards against arms that do different work: a fixed length, greedy, and streamed."""
    prompts = PromptSource(range(100), 4).make()
    record = Record(0, 6, 3, (1, 2))
    sent = orjson.loads(body(prompts, record, PromptSource(range(100), 4)))
    assert sent["input_ids"] == prompts.prompt(record)
    assert sent["sampling_params"] == {"temperature": 0, "max_new_tokens": 3, "ignore_eos": True}
    assert sent["stream"] is True


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_openai_bodies_ask_for_the_same(endpoint: Endpoint) -> None:
    """Guards the endpoints of fleets that are not SGLang's: the same length, and usage, without
    which tokens could not be counted."""
    source = PromptSource(range(100), 4, endpoint=endpoint, model="m")
    sent = orjson.loads(body(source.make(), Record(0, 6, 3, (1, 2)), source))
    assert (sent["model"], sent["max_tokens"], sent["ignore_eos"]) == ("m", 3, True)
    assert sent["stream_options"]["include_usage"] is True
    prompt = sent["prompt"] if endpoint == "completions" else sent["messages"][0]["content"].split()
    assert len(prompt) == 6


def test_the_stubs_cache_hits_prefixes() -> None:
    """Guards the stub's cached tokens: leading pages only."""
    cache = PrefixCache()
    assert cache.cached(list(range(200))) == 0
    assert cache.cached(list(range(200))) == 192
    assert cache.cached([*range(64), *range(500, 600), *range(64)]) == 64
