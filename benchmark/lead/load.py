"""Sessions, and clients whose prompts nobody has seen before, at the same time."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from aiohttp import ClientSession

from benchmark.harness.client import Request, Result, Target, open_session, send
from benchmark.harness.workload import SharedPrefixes

SHAPE = {
    "layers": 1,
    "heads": 2,
    "kv_heads": 1,
    "head_dim": 32,
    "hidden": 256,
    "intermediate": 1536,
}
"""SGLang's attention on a CPU computes the whole square of a prompt, also where most is cached: a
short turn costs as much as its history. This model has little of it, so that a turn costs by its
new tokens, as on a GPU: about a fortieth of a cold prompt."""


@dataclass(frozen=True)
class Load:
    """What is sent; the same to all arms. Lengths and pools in tokens."""

    talks: int = 6
    """At once. Each sends its next turn when it has the answer to the last one."""
    turns: int = 10
    """Of each talk. With 6 of them a round of one load took 4 to 8 s, and its requests/s said more
    about those seconds than about the arm."""
    first_tokens: int = 512
    turn_tokens: int = 112
    answer_tokens: int = 40
    cold_tokens: int = 5000
    cold_answer_tokens: int = 8
    cold_clients: tuple[int, ...] = (0, 2, 4)
    """Clients beside the talks that send a cold prompt when they have the answer to the last one;
    a load each, in this order, to the same servers. 0 is the quiet one."""
    pool_tokens: int = 32_000
    """KV pool of every server."""
    chunk_tokens: int = 8192
    """``--chunked-prefill-size``; 8,192 is SGLang's own choice on an H100."""
    local_tokens: int = 256
    """``--disaggregation-decode-local-tokens`` of the arms that have it."""
    seed: int = 0

    def conversations(self, vocabulary: range, clients: int) -> dict[str, list[tuple[int, ...]]]:
        """The users' sides of the sessions beside so many cold clients, which share nothing: the
        token ids of each turn by label; others for each number of clients."""
        rng = random.Random(self.seed + 1000 * clients)

        def said(first: int, tokens: int) -> tuple[int, ...]:
            return (first, *rng.choices(vocabulary, k=tokens - 1))

        return {
            f"c{i}": [
                said(start, self.first_tokens),
                *(said(rng.choice(vocabulary), self.turn_tokens) for _ in range(self.turns - 1)),
            ]
            for i, start in enumerate(rng.sample(vocabulary, self.talks))
        }

    def cold_prompt(self, vocabulary: range, label: str) -> tuple[int, ...]:
        """The prompt of a label, which is the same in all arms."""
        rng = random.Random(f"{self.seed} {label}")
        return tuple(rng.choices(vocabulary, k=self.cold_tokens))


@dataclass
class Played:
    """What came back. A turn's label is ``TALK.TURN``, from 0."""

    talks: list[Result] = field(default_factory=list)
    cold: list[Result] = field(default_factory=list)
    seconds: float = 0.0
    """From the first turn sent to the last one answered."""


def play(target: Target, load: Load, vocabulary: range, clients: int) -> Played:
    """Plays all sessions beside so many cold clients, who are under way when the sessions begin."""
    return asyncio.run(_play(target, load, vocabulary, clients))


async def _play(target: Target, load: Load, vocabulary: range, clients: int) -> Played:
    played, done = Played(), asyncio.Event()
    async with open_session() as session:

        async def cold(client: int) -> None:
            number = 0
            while not done.is_set():
                label = f"cold {clients}.{client}.{number}"
                prompt = load.cold_prompt(vocabulary, label)
                request = Request(prompt, load.cold_answer_tokens, label=label)
                played.cold.append(await send(session, target, request))
                number += 1

        tasks = [asyncio.create_task(cold(client)) for client in range(clients)]
        if clients:
            await asyncio.sleep(1.0)
        began = time.monotonic()
        talks = load.conversations(vocabulary, clients)
        answered = await asyncio.gather(
            *(_talk(session, target, *talk, load.answer_tokens) for talk in talks.items())
        )
        played.seconds = time.monotonic() - began
        done.set()
        await asyncio.gather(*tasks)  # their last answers; nobody is cut short
    played.talks = [result for results in answered for result in results]
    return played


async def _talk(
    session: ClientSession,
    target: Target,
    label: str,
    turns: Sequence[tuple[int, ...]],
    answer_tokens: int,
) -> Sequence[Result]:
    prompt, results = (), []
    for number, said in enumerate(turns):
        answer = results[-1].output_ids if results else ()
        prompt = (*prompt, *answer, *said)
        request = Request(prompt, answer_tokens, label=f"{label}.{number}")
        results.append(await send(session, target, request))
    return results


BURST_SHAPE = {"layers": 1, "heads": 2, "kv_heads": 1, "head_dim": 32}
"""Attention on a CPU costs each request its whole context anew at every step, so that a step's time
grows with the batch and hides what the batch is worth. This model has as little of it as can be; on
a GPU a step's time depends little on the batch as well."""


@dataclass(frozen=True)
class Burst(SharedPrefixes):
    """The load and the sizes, the same for all arms. Lengths and pools in tokens."""

    requests: int = 24
    groups: int = 2
    prefix_tokens: int = 3000
    suffix_tokens: int = 100
    generated_tokens: int = 160
    decode_pool: int = 8000
    prefill_pool: int = 16000
    reserved_decode_tokens: int = 512
    chunked_prefill_tokens: int = 512
    max_running: int = 32
