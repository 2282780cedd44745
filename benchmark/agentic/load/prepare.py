"""Request bodies, prepared ahead in a separate process.

Drawing and encoding a prompt of 100,000 tokens takes tens of milliseconds. In the sending process,
this would delay all requests that are due in that time.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import threading
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

import orjson

from benchmark.harness.client import Message, Request
from benchmark.traces.prompts import Prompts
from benchmark.traces.record import Record

Endpoint = Literal["generate", "completions", "chat"]

_SAID = """
time year people way day man thing woman life child world school state family student group country
problem hand part place case week company system program question work number night point home water
room mother area money story fact month lot right study book eye job word business issue side kind
head house service friend father power hour game line end member law city name team minute idea body
"""
_WORDS = _SAID.split()
"""Most tokenizers make one token of each of these words, which make up chat messages."""
_NICENESS = 10  # preparing bodies may be delayed, sending may not


@dataclass(frozen=True)
class PromptSource:
    """Arguments of ``benchmark.traces.prompts.Prompts``, which lives in the other process, and the
    endpoint that the bodies are for."""

    vocabulary: Sequence[int]
    block_tokens: int
    seed: int = 0
    endpoint: Endpoint = "generate"
    model: str = "default"
    """Model name, for OpenAI's endpoints."""

    @property
    def path(self) -> str:
        """URL path that the bodies are sent to."""
        paths = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
        return paths.get(self.endpoint, "/generate")

    def make(self) -> Prompts:
        return Prompts(self.vocabulary, self.block_tokens, self.seed)


def body(prompts: Prompts, record: Record, source: PromptSource) -> bytes:
    """Return a streaming request with the record's prompt and exactly its answer's length.

    A chat message has one word for each token, so that its length in tokens is about the record's.
    """
    ids = prompts.prompt(record)
    if source.endpoint == "generate":
        return orjson.dumps(Request(ids, record.output_length).body())
    content: dict[str, Any] = {"prompt": ids}
    if source.endpoint == "chat":
        text = " ".join(_WORDS[token % len(_WORDS)] for token in ids)
        content = {"messages": [{"role": "user", "content": text}]}
    return orjson.dumps(
        {
            **content,
            "model": source.model,
            "max_tokens": record.output_length,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
    )


class Bodies:
    """A context manager that starts the process, and ends it on exit."""

    def __init__(self, source: PromptSource) -> None:
        self.block_tokens = source.block_tokens
        self._pool = ProcessPoolExecutor(
            1, multiprocessing.get_context("spawn"), initializer=_begin, initargs=(source,)
        )

    def submit(self, record: Record | None) -> asyncio.Future[Message]:
        """Start making a body, in the order of submission. The future raises ``ValueError`` for a
        record whose ids do not cover its prompt."""
        return asyncio.get_running_loop().run_in_executor(self._pool, _make, record)

    def __enter__(self) -> Bodies:
        self._pool.submit(os.getpid).result()  # otherwise the first request waits for the process
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown(cancel_futures=True)


_prompts: tuple[Prompts, PromptSource] | None = None


def _begin(source: PromptSource) -> None:
    global _prompts
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the sending process handles Ctrl-C
    os.nice(_NICENESS)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _prompts = source.make(), source


def _end_with_parent() -> None:
    """Exit with the parent; otherwise a pool's process waits for work for ever if it is killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _make(record: Record) -> Message:
    assert _prompts is not None
    prompts, source = _prompts
    made = body(prompts, record, source)
    return Message(made, record.output_length, record.session_id, source.path)
