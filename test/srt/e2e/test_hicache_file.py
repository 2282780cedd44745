"""Buffer-only HiCache over files: greedy output is the aggregated server's, however store calls
end. ``HICACHE_PAGE_SIZE=16`` for another page size."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests

from benchmark.harness import checks
from e2e import hicache
from e2e.hicache import Backend, Questions, Server, check_answers, check_disconnects, questions
from e2e.steered_file import METHODS, Gates, SteeredFile
from e2e.support import Reference, until

PAGE = hicache.page_size(64)
DEADLINE_S = 2.0
HELD_PAGES = {"batch_get_v1": "read_pages", "batch_set_v1": "write_pages"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("file")


@pytest.fixture(scope="module")
def asked(model: Path, reference: Reference) -> Questions:
    return questions(model, reference, PAGE)


@pytest.fixture(scope="module")
def servers(model: Path, folder: Path) -> Iterator[list[Server]]:
    """A writer, and a reader with store calls that ``gates`` controls."""
    for part in ("gates", "store"):  # because concurrent servers may both create it
        (folder / part).mkdir()
    env = {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(folder / "store")}
    steered = {
        "backend_name": "steered_file",
        "module_path": SteeredFile.__module__,
        "class_name": SteeredFile.__name__,
        "gates": str(folder / "gates"),
    }
    backends = [Backend("file", {}, env), Backend("dynamic", steered, env)]
    with hicache.servers(model, folder, PAGE, backends, DEADLINE_S) as started:
        yield started


@pytest.fixture
def reader(servers: list[Server]) -> Server:
    """The reader with an empty tree."""
    servers[1].flush()
    return servers[1]


@pytest.fixture
def gates(folder: Path) -> Gates:
    return Gates(folder / "gates")


def test_cold_from_the_store_and_in_another_process(
    servers: list[Server], asked: Questions
) -> None:
    """Guards against the same faults as over Mooncake, with another page size and layout."""
    check_answers(*servers, asked, PAGE)


def test_clients_that_leave(reader: Server, asked: Questions) -> None:
    """Guards against pages of disconnected clients that stay in the stage."""
    check_disconnects(reader, asked)


def test_calls_that_hang(reader: Server, gates: Gates, asked: Questions) -> None:
    """Guards against a hung call that delays other requests, and against reuse of memory that the
    call may still access: its pages are freed when it returns. A flush works during the call."""
    for method in METHODS:
        prompts, expected = asked.fresh()
        reader.flush()
        with gates.hold(method):
            assert reader.generated(prompts) == expected
            gates.wait_held(method)
            reader.flush()  # waits until the call has been abandoned
            assert reader.generated(prompts) == expected
            if method in HELD_PAGES:
                until(lambda pages=HELD_PAGES[method]: reader.stage()[pages] > 0)
        hicache.wait_used_again(reader, prompts, expected)
    reader.wait_drained()


@pytest.mark.hazard("flush-or-detach-under-way")
def test_a_store_that_takes_nothing(
    reader: Server, gates: Gates, asked: Questions, model: Path
) -> None:
    """Guards against writes that store nothing and report no error: they must neither delay
    requests nor block a flush, because a server ends if it cannot flush before a weight update."""
    prompts, expected = asked.fresh()
    reader.flush()
    with gates.refuse():
        assert reader.generated(prompts) == expected
        checks.wait_idle(reader.process, reader.url, 30.0)
        checks.flush(reader.url)  # without waiting
        assert reader.generated(prompts) == expected
        checks.wait_idle(reader.process, reader.url, 30.0)
        body = {"model_path": str(model), "flush_cache": True}
        updated = requests.post(f"{reader.url}/update_weights_from_disk", json=body, timeout=120)
        assert updated.json()["success"], updated.text
        assert reader.generated(prompts) == expected
    hicache.wait_used_again(reader, prompts, expected)
    reader.wait_drained()


def test_keys_that_are_lost_and_data_that_is_short(
    reader: Server, folder: Path, asked: Questions
) -> None:
    """Guards against wrong answers from files that vanish or shrink; they only cost hits."""
    for number, file in enumerate(sorted((folder / "store").glob("*.bin"))):
        if number % 3 == 0:
            file.unlink()
        elif number % 3 == 1:
            os.truncate(file, file.stat().st_size // 2)
    assert reader.generated(asked.prompts) == asked.expected
    hicache.wait_used_again(reader, *asked.some())
    reader.wait_drained()
