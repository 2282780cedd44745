"""Buffer-only HiCache over Mooncake: greedy output is the aggregated server's, even while the store
fails. ``HICACHE_PAGE_SIZE=64`` for another page size."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import requests

from component.buffer_only.masters import Master
from e2e import hicache
from e2e.hicache import Backend, Questions, Server, check_answers, questions
from e2e.support import Reference
from models.random_qwen3 import build

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
    """A writer, and a reader with the same model in another folder."""
    folder = tmp_path_factory.mktemp("mooncake")
    writes = Backend("mooncake", master.extra_config, {"MC_FORCE_TCP": "1"})
    reads = replace(writes, model=build(folder / "twin", seed=0))
    with hicache.servers(model, folder, PAGE, [writes, reads], DEADLINE_S) as running:
        yield running


def test_cold_from_the_store_and_in_another_process(
    servers: list[Server], asked: Questions
) -> None:
    """Guards against pages under a wrong key, a stage page that is reused before the store or the
    device has copied it, and a prefix published at the wrong place. 16 requests at once share 32
    staging pages, a small part of the pages that they write and read."""
    check_answers(*servers, asked, PAGE)


def test_a_master_that_stops_and_goes_on(
    servers: list[Server], master: Master, asked: Questions
) -> None:
    """Guards against wrong or missing answers while the store does not respond. When it continues,
    abandoned calls must not leave staging pages behind, and the store is used again."""
    _, reader = servers
    reader.flush()
    prompts, expected = asked.some()
    master.freeze()
    try:
        assert reader.generated(prompts) == expected
    finally:
        master.thaw()
    hicache.wait_used_again(reader, prompts, expected)
    reader.wait_drained()


def test_a_master_that_loses_everything(
    servers: list[Server], master: Master, asked: Questions
) -> None:
    """Guards against wrong answers after a restart of the master, which then has neither keys nor
    servers, and against servers that do not store and share pages again afterwards."""
    writer, reader = servers
    reader.flush()
    writer.flush()
    prompts, expected = asked.some()
    master.kill()
    assert reader.generated(prompts) == expected
    master.start()
    assert reader.generated(prompts) == expected
    hicache.wait_used_again(reader, prompts, expected)
    # The reader finds new pages of the writer.
    prompts, expected = asked.others()
    hicache.wait_used_again(writer, prompts, expected)
    answers = reader.answers(prompts)
    assert [answer["output_ids"] for answer in answers] == expected
    assert all(hicache.from_store(answers))
    writer.wait_drained()
    reader.wait_drained()


@pytest.mark.hazard("tenants-meet-in-store")
def test_models_meet_when_their_weights_are_the_same(
    servers: list[Server], asked: Questions, model: Path, tmp_path: Path
) -> None:
    """Guards against KV of other weights: Mooncake's own keys contain neither the model nor its
    weights, so every token would be wrong. After an update, pages stored with the old weights must
    not be found, although the store is not cleared; and a server with the old weights must not find
    those stored with the new ones."""
    writer, reader = servers
    hicache.wait_used_again(writer, *asked.some())
    _update(reader, build(tmp_path / "other", seed=1))
    prompts, expected = asked.fresh()  # two stored prompts, and a new one
    other_answers = reader.answers(prompts)
    assert not any(hicache.from_store(other_answers))
    assert all(
        answer["output_ids"] != expected_ids
        for answer, expected_ids in zip(other_answers, expected, strict=True)
    )
    reader.wait_drained()

    writer.flush()
    answers = writer.answers(prompts)
    assert [answer["output_ids"] for answer in answers] == expected
    assert [stored > 0 for stored in hicache.from_store(answers)] == [True, True, False]
    writer.wait_drained()

    _update(reader, model)
    answers = reader.answers(prompts)
    assert [answer["output_ids"] for answer in answers] == expected
    assert all(hicache.from_store(answers))
    reader.wait_drained()


def _update(server: Server, model: Path) -> None:
    body = {"model_path": str(model), "flush_cache": True}
    answer = requests.post(f"{server.url}/update_weights_from_disk", json=body, timeout=120)
    assert answer.json()["success"], answer.text


@pytest.mark.nightly
def test_two_ranks_and_one(
    one_head: Path, one_head_reference: Reference, master: Master, tmp_path: Path
) -> None:
    """Guards against ranks that start different transfers, which would end their server, against a
    hit that one rank has not stored, and against servers that load pages of another number of
    ranks: with one KV head, a rank's replica is as large as the page of a single rank."""
    prompts, expected = questions(one_head, one_head_reference, PAGE).some()
    alone = Backend("mooncake", master.extra_config, {"MC_FORCE_TCP": "1"})
    both = [replace(alone, ranks=2), alone]
    with hicache.servers(one_head, tmp_path, PAGE, both, DEADLINE_S) as (two_ranks, one_rank):
        assert two_ranks.generated(prompts) == expected
        two_ranks.flush()
        for server, is_stored in ((two_ranks, True), (one_rank, False)):
            answers = server.answers(prompts)
            assert [answer["output_ids"] for answer in answers] == expected
            assert {stored > 0 for stored in hicache.from_store(answers)} == {is_stored}
            server.wait_drained()
