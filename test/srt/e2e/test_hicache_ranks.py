"""Two tensor parallel ranks over one Mooncake store, and a server of one rank beside them.

The model has one KV head, of which each of two ranks holds a replica: a rank's share of a page is
as large as the whole page of the server of one rank, under a key that SGLang would call the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from benchmark.harness.pair import Aggregated
from benchmark.harness.servers import Sizes
from component.buffer_only.masters import Master
from e2e import hicache
from e2e.hicache import Backend
from e2e.hicache_scenarios import questions
from e2e.support import START_METHOD, Reference
from models.random_qwen3 import build

PAGE = hicache.page_size(16)


@pytest.fixture
def one_head(tmp_path: Path) -> Path:
    return build(tmp_path / "one_head", seed=1, kv_heads=1, layers=2)


@pytest.fixture
def reference(one_head: Path, tmp_path: Path) -> Iterator[Reference]:
    """The model's aggregated server."""
    server = Aggregated(
        one_head,
        tmp_path / "reference",
        Sizes(pool_tokens=20_000, chunked_prefill_tokens=2048),
        extra_args=("--sleep-on-idle",),
        env={START_METHOD: "fork"},
    )
    with server:
        yield Reference(server)


@pytest.mark.nightly
def test_two_ranks_and_one(one_head: Path, reference: Reference, tmp_path: Path) -> None:
    """Ranks that start different transfers end their server; what one rank has not stored is no hit
    on the other; and servers of other numbers of ranks do not meet."""
    asked = questions(one_head, reference, PAGE)
    prompts, expected = asked.some()
    master = Master()
    alone = Backend("mooncake", master.extra_config, {"MC_FORCE_TCP": "1"})
    try:
        with hicache.servers(one_head, tmp_path, PAGE, [replace(alone, ranks=2), alone], 4.0) as (
            two,
            one,
        ):
            assert two.generated(prompts) == expected
            two.flush()
            answers = two.answers(prompts)
            assert [answer["output_ids"] for answer in answers] == expected
            assert all(hicache.from_store(answers))
            two.drained()

            answers = one.answers(prompts)
            assert [answer["output_ids"] for answer in answers] == expected
            assert not any(hicache.from_store(answers))
            one.drained()
    finally:
        master.kill()
