"""Parallel samples (``n`` above 1): each request that SGLang makes of one gets a room of its own.

SGLang's tokenizer first sends the prompt alone, so that the samples find its KV, and then each
sample. All of them carry the number of the client's room. Here the prompt keeps that number, and
the samples get numbers that follow from it by one rule, which both servers of a pair apply.
"""

from __future__ import annotations

import asyncio

from sglang.srt.disaggregation.delta.capability import fetch_capabilities

#: A room has 63 bits; the number of a sample is in the upper ones, so that a data-parallel rank,
#: which follows from the lower ones, is the same for all samples of a prompt where the number of
#: ranks is a power of two.
_SHIFT = 47
#: Of one prompt. There are numbers for 65,535, which would fill the line of both servers: they are
#: checked 128 a step when their client is gone.
MOST_SAMPLES = 1024


def room_of_sample(room: int, index: int) -> int:
    """The room of a prompt (``index`` 0) or of its sample ``index``, from the client's ``room``."""
    return room ^ (index << _SHIFT)


async def check_samples(address: str, samples: int) -> None:
    """Check that the prefill server at ``address`` (host:port) numbers samples, too.

    Raises:
        ValueError: the client gets status 400.
    """
    prefill = await asyncio.to_thread(fetch_capabilities, address)
    if prefill is not None and not prefill.samples:
        raise ValueError(
            f"n is {samples}, and prefill server {address} gives all samples of a request one "
            "room: it runs without this package or with an older version of it"
        )
