"""KV events (``--kv-events-config``): a router sees a decode server's tree as it sees an aggregated
server's."""

from __future__ import annotations

from typing import Any

import pytest

from component.decode import kv
from component.decode.decoder import Decoder
from component.decode.steps import PROMPT, evict_all, finish, ids, run, serve
from sglang.srt.mem_cache.base_prefix_cache import InsertParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey

LATER = [*PROMPT, *ids(5, 48)]
"""A second turn: 3 more pages of 16."""


class Publisher:
    """Records what SGLang's publisher would send."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def publish(self, batch: Any) -> None:
        self.events += batch.events

    def take(self, kind: str) -> list[Any]:
        """Return the recorded events of a kind, and forget all."""
        events = [event for event in self.events if type(event).__name__ == kind]
        self.events = []
        return events


@pytest.fixture(params=[1, 16])
def decoder(request: pytest.FixtureRequest) -> Decoder:
    """A decode server that publishes events."""
    decoder = Decoder(request.param, 1024)
    decoder.tree_cache.enable_kv_cache_events = decoder.enable_kv_cache_events = True
    decoder.kv_event_publisher = Publisher()
    return decoder


def aggregated(page: int, *texts: list[int]) -> list[Any]:
    """Return the events of SGLang's own tree that stores ``texts`` one after the other."""
    _, allocator = kv.build_pool(1024, page)
    tree = RadixCache(
        CacheInitParams(
            disable=False,
            req_to_token_pool=None,
            token_to_kv_pool_allocator=allocator,
            page_size=page,
        )
    )
    tree.enable_kv_cache_events = True  # not before, because a new tree announces that it is empty
    for text in texts:
        whole = text[: len(text) // page * page]
        tree.insert(InsertParams(key=RadixKey(whole), value=allocator.alloc(len(whole))))
    return list(tree.take_events())


def blocks(events: list[Any]) -> list[tuple[Any, ...]]:
    """Return what a router identifies a stored block by."""
    return [
        (tuple(event.block_hashes), event.parent_block_hash, tuple(event.token_ids))
        for event in events
    ]


def test_blocks_are_those_of_an_aggregated_server(decoder: Decoder) -> None:
    """Guards against blocks that a router cannot match with prompts, blocks that are stored twice
    although prefill sent only the rest of a turn, and blocks that are never removed."""
    page = decoder.page_size
    for prompt in (PROMPT, LATER):
        serve(decoder, prompt)
    decoder._publish_kv_events()
    stored = decoder.kv_event_publisher.take("BlockStored")
    assert len(stored) == len(LATER) // page
    assert blocks(stored) == blocks(aggregated(page, PROMPT, LATER))
    evict_all(decoder)
    decoder._publish_kv_events()
    removed = decoder.kv_event_publisher.take("BlockRemoved")
    assert {tuple(e.block_hashes) for e in removed} == {tuple(e.block_hashes) for e in stored}


def test_a_prompt_is_published_when_its_request_starts(decoder: Decoder) -> None:
    """Guards against a router that learns of a prompt only when its answer has ended, or with the
    next log line: an aggregated server publishes after each prefill batch."""
    run(decoder, PROMPT, new=50)
    stored = decoder.kv_event_publisher.take("BlockStored")
    assert len(stored) == len(PROMPT) // decoder.page_size
    finish(decoder)
