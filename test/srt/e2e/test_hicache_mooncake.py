"""Buffer-only HiCache over Mooncake: greedy output is the aggregated server's, whatever happens to
the store. ``HICACHE_PAGE_SIZE=64`` for another page size."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmark.harness import checks
from component.buffer_only.masters import Master
from e2e import hicache
from e2e.hicache import Backend, Server
from e2e.hicache_scenarios import Questions, answers_are_right, questions
from e2e.support import Reference

PAGE = hicache.page_size(16)
DEADLINE_S = 4.0


@pytest.fixture(scope="module")
def asked(model: Path, reference: Reference) -> Questions:
    return questions(model, reference, PAGE)


@pytest.fixture(scope="module")
def master() -> Iterator[Master]:
    running = Master()
    yield running
    running.kill()


@pytest.fixture(scope="module")
def servers(
    model: Path, master: Master, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[Server]]:
    """A writer and a reader."""
    backend = Backend("mooncake", master.extra_config, {"MC_FORCE_TCP": "1"})
    folder = tmp_path_factory.mktemp("mooncake")
    with hicache.servers(model, folder, PAGE, [backend] * 2, DEADLINE_S) as running:
        yield running


def test_cold_from_the_store_and_in_another_process(
    servers: list[Server], asked: Questions
) -> None:
    """Pages under a wrong key, a stage page reused before the store or the device had copied it,
    or a prefix published at the wrong place would change what is generated. 16 requests at once
    share 32 staging pages, many times less than what they write and read."""
    answers_are_right(*servers, asked, PAGE)


def test_a_master_that_stops_and_goes_on(
    servers: list[Server], master: Master, asked: Questions
) -> None:
    """A store that answers nobody costs hits, for reads and for writes: answers come, and are
    right, while it is stopped. When it goes on, the calls that were given up must not leave staging
    pages behind, and the store is used again."""
    _, reader = servers
    reader.flush()
    prompts, expected = asked.some()
    master.freeze()
    try:
        assert reader.generated(prompts) == expected
    finally:
        master.thaw()
    hicache.works_again(reader, prompts, expected)
    reader.drained()


@pytest.mark.nightly
def test_nobody_waits_longer_than_the_variable_says(
    model: Path, master: Master, asked: Questions, tmp_path: Path
) -> None:
    """``SGLANG_HICACHE_BUFFER_READ_TIMEOUT``, with a store that answers nobody and whose own
    deadline is far away: all requests at once wait for one call each, and not for each other's."""
    prompts, expected = asked.prompts, asked.expected
    wait_s = 3.0
    env = {
        "MC_FORCE_TCP": "1",
        "SGLANG_HICACHE_BUFFER_READ_TIMEOUT": str(wait_s),
        "SGLANG_HICACHE_STORE_DEADLINE": "60",
    }
    backend = Backend("mooncake", master.extra_config, env)
    with hicache.servers(model, tmp_path, PAGE, [backend], DEADLINE_S) as (server,):
        start = time.monotonic()
        assert server.generated(prompts) == expected
        computed_s = time.monotonic() - start
        server.flush()
        master.freeze()
        try:
            start = time.monotonic()
            assert server.generated(prompts) == expected
            took_s = time.monotonic() - start
            checks.wait_idle(server.process, server.url, 30.0)
            checks.flush(server.url)
        finally:
            master.thaw()
        # A slow machine may compute at half the speed the second time.
        assert took_s < 2 * computed_s + wait_s + 2.0
        hicache.works_again(server, *asked.some())
        server.drained()


def test_a_master_that_loses_everything(
    servers: list[Server], master: Master, asked: Questions
) -> None:
    """A master that is killed and started anew knows no key and no server: what was stored is lost,
    no answer is; and servers that run on can store and share pages again."""
    writer, reader = servers
    reader.flush()
    writer.flush()
    prompts, expected = asked.some()
    master.kill()
    assert reader.generated(prompts) == expected
    master.start()
    assert reader.generated(prompts) == expected
    hicache.works_again(reader, prompts, expected)
    # And what one of them writes now, the other one reads.
    prompts, expected = asked.others()
    hicache.works_again(writer, prompts, expected)
    answers = reader.answers(prompts)
    assert [answer["output_ids"] for answer in answers] == expected
    assert all(hicache.from_store(answers))
    writer.drained()
    reader.drained()
