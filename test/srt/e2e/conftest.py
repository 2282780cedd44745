"""Real servers for the end-to-end tests: one reference server a session, one pair a scenario."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.support import Reference, reference_server
from models.random_qwen3 import build


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random-weight model with greedy output that depends on the whole context."""
    return build(tmp_path_factory.mktemp("model") / "random_qwen3", seed=0)


@pytest.fixture(scope="session")
def reference(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reference]:
    """Stock SGLang's aggregated server with page size 1, which gives the right answers."""
    with reference_server(model, tmp_path_factory.mktemp("reference"), 60_000) as running:
        yield running


@pytest.fixture(scope="session")
def one_head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with one KV head, so that each of two ranks holds a replica."""
    return build(tmp_path_factory.mktemp("model") / "one_head", seed=1, kv_heads=1, layers=2)


@pytest.fixture(scope="session")
def one_head_reference(
    one_head: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Reference]:
    """The aggregated server of ``one_head``."""
    with reference_server(one_head, tmp_path_factory.mktemp("one_head"), 20_000) as running:
        yield running


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    """A folder for one scenario's server logs and event logs."""
    return tmp_path / "logs"
