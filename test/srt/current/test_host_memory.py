"""The pool of retracted requests in host memory of a decode server."""

from __future__ import annotations

import pytest

from current.decode import Decode
from current.texts import text

#: Other backends copy by kernels of a GPU.
COPIES = ("--hicache-io-backend", "direct")


@pytest.mark.server(*COPIES, "--disaggregation-decode-retraction-backup", "host_pool")
def test_stock_never_unlocks_what_it_copies_to_the_pool_of_retracted_requests(
    decode: Decode,
) -> None:
    """The reason of a refused setting: without HiCache no code reads that a copy has ended."""
    prompt = text(96, 1)
    (answer,) = decode.learn([prompt], 4)
    rid = decode.ask(prompt, 4)
    decode.finish()
    decode.step(5)
    assert decode.output(rid) == answer and decode.balance()["locked"] == 96
    decode.scheduler.tree_cache.check_hicache_events()
