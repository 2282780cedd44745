"""What servers with a stage are put through over each store."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmark.harness.client import Request, Target, open_session, send
from e2e.hicache import NEW_TOKENS, STAGE_PAGES, Server, from_store
from e2e.support import Ids, Reference, prompt_maker


@dataclass(frozen=True)
class Questions:
    """Prompts and the aggregated server's answers."""

    prompts: list[Ids]
    expected: list[Ids]
    spare: list[tuple[Ids, Ids]]
    """More of them, which ``fresh`` hands out."""

    def fresh(self) -> tuple[list[Ids], list[Ids]]:
        """Two that share a prefix, and one that no server has seen."""
        prompts, expected = self._pick(0, 2)
        prompt, answer = self.spare.pop()
        return [*prompts, prompt], [*expected, answer]

    def some(self) -> tuple[list[Ids], list[Ids]]:
        """Two that share a prefix, and one that shares nothing."""
        return self._pick(0, 2, -1)

    def others(self) -> tuple[list[Ids], list[Ids]]:
        """Two that share nothing with ``some``."""
        return self._pick(1, -2)

    def _pick(self, *which: int) -> tuple[list[Ids], list[Ids]]:
        return [self.prompts[i] for i in which], [self.expected[i] for i in which]


def questions(model: Path, reference: Reference, seed: int) -> Questions:
    """16 prompts, most of which start with one of two prefixes."""
    tokens = prompt_maker(model, seed)
    prefixes = [tokens(330), tokens(410)]
    prompts: list[Ids] = [[*prefixes[i % 2], *tokens(140 + 17 * i)] for i in range(12)]
    prompts += [tokens(500 + 31 * i) for i in range(4)]
    spare = [tokens(300) for _ in range(8)]
    answers = reference.answers([*prompts, *spare], NEW_TOKENS)
    return Questions(prompts, answers[:16], list(zip(spare, answers[16:], strict=True)))


def answers_are_right(writer: Server, reader: Server, asked: Questions, page: int) -> None:
    """Cold, from the store after a flush, and from the store in a process that never saw them."""
    prompts, expected = asked.prompts, asked.expected
    assert writer.generated(prompts) == expected
    writer.flush()
    again = writer.answers(prompts)
    assert [answer["output_ids"] for answer in again] == expected
    _all_from_store(prompts, again, page)
    after = writer.drained()
    assert 0 < after["peak_pages"] <= STAGE_PAGES
    unique = {tuple(p[: end * page]) for p in prompts for end in _whole(p, page)}
    assert after["store_written_pages_total"] >= len(unique)
    assert after.get("dropped_tokens_total", 0) == 0
    assert after["prefetch_timeouts_total"] == 0

    elsewhere = reader.answers(prompts)
    assert [answer["output_ids"] for answer in elsewhere] == expected
    _all_from_store(prompts, elsewhere, page)
    reader.drained()


def clients_leave(server: Server, asked: Questions) -> None:
    """16 at once: half of them are in the store, the others are new, so that reads and writes are
    both under way when their clients disconnect."""
    rng = random.Random(1)
    server.flush()
    fresh = [rng.sample(prompt, len(prompt)) for prompt in asked.prompts[8:]]
    fickle = [*asked.prompts[:8], *fresh]
    patience = [rng.uniform(0.02, 1.5) for _ in fickle]
    assert asyncio.run(_leave(server.url, fickle, patience)) > 0
    server.flush()
    prompts, expected = asked.some()
    assert server.generated(prompts) == expected
    server.drained()


def _all_from_store(prompts: list[Ids], answers: list[dict[str, Any]], page: int) -> None:
    """All whole pages of all prompts were hits, of each prompt some in the store."""
    for prompt, answer, stored in zip(prompts, answers, from_store(answers), strict=True):
        meta = answer["meta_info"]
        assert meta["cached_tokens"] == (len(prompt) - 1) // page * page
        assert stored > 0
        assert meta["cached_tokens_details"]["device"] + stored == meta["cached_tokens"]


def _whole(prompt: Ids, page: int) -> range:
    """1, 2, ... up to the whole pages of a prompt."""
    return range(1, len(prompt) // page + 1)


async def _leave(url: str, prompts: list[Ids], patience_s: list[float]) -> int:
    """Asks all prompts at once and disconnects from each after its patience; how many left."""

    async def one(session: Any, prompt: Ids, patience: float) -> bool:
        request = Request(prompt, NEW_TOKENS)
        try:
            await asyncio.wait_for(send(session, Target(url), request), patience)
        except asyncio.TimeoutError:
            return True
        return False

    async with open_session() as session:
        left = await asyncio.gather(
            *(one(session, *each) for each in zip(prompts, patience_s, strict=True))
        )
    return sum(left)
