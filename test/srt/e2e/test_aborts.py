"""Clients that go away at every stage, on a pool that is always full."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import aiohttp
import pytest

from benchmark.harness.client import Request, Result, Target, open_session, send
from benchmark.harness.pair import Pair
from e2e.support import Reference, pair_config, prompt_maker, settle

NEW_TOKENS = 24


async def send_and_leave(
    target: Target, requests: list[Request], patience_s: list[float | None]
) -> list[Result | None]:
    """All at once; a client with a patience disconnects from both servers after it."""

    async def one(
        session: aiohttp.ClientSession, request: Request, patience: float | None
    ) -> Result | None:
        try:
            return await asyncio.wait_for(send(session, target, request), patience)
        except asyncio.TimeoutError:
            return None

    async with open_session() as session:
        return list(
            await asyncio.gather(
                *(one(session, r, p) for r, p in zip(requests, patience_s, strict=True))
            )
        )


@pytest.mark.hazard("abort-leaves-something")
def test_disconnected_clients(model: Path, reference: Reference, logs: Path) -> None:
    """A client may leave while its request waits for memory, is moved, or generates. Its pages
    must neither leak nor be written to after others got them: whoever stays gets the aggregated
    server's answer, and afterwards both servers are idle, balanced and empty."""
    rng = random.Random(6)
    tokens = prompt_maker(model, seed=6)
    prefixes = [tokens(500), tokens(700)]
    prompts = [[*prefixes[i % 2], *tokens(30 + i)] for i in range(36)]
    expected = reference.answers(prompts, NEW_TOKENS)
    # Seeded moments from "at once" to "nearly served"; every third client stays.
    patience = [None if i % 3 == 0 else rng.uniform(0.05, 6.0) for i in range(len(prompts))]
    with Pair(pair_config(model, logs, page_size=16, decode_tokens=3200), logs) as pair:
        requests = [Request(prompt, NEW_TOKENS) for prompt in prompts]
        results = asyncio.run(send_and_leave(pair.target, requests, patience))
        stayed = [i for i, result in enumerate(results) if result is not None]
        assert len(stayed) >= len(prompts) // 3
        for i in stayed:
            result = results[i]
            assert result is not None and result.error is None, result
            assert result.output_ids == expected[i]
        settle(pair)
        # Nothing of the aborted ones is left in the way: the same prompts are answered right.
        assert pair.generate(prompts[:6], NEW_TOKENS) == expected[:6]
        settle(pair)
