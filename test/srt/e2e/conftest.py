"""Real servers for the end-to-end tests: one reference server a session, one pair a scenario."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmark.harness.pair import Aggregated
from benchmark.harness.servers import Sizes
from e2e.support import START_METHOD, Reference
from models.random_qwen3 import build


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random-weight model whose greedy output depends on its whole context."""
    return build(tmp_path_factory.mktemp("model") / "random_qwen3", seed=0)


@pytest.fixture(scope="session")
def reference(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reference]:
    """SGLang's own aggregated server, stock, at page size 1: what every answer is compared with."""
    sizes = Sizes(pool_tokens=60_000, chunked_prefill_tokens=2048)
    # Between its own requests it would spin on one of the few cores.
    server = Aggregated(
        model,
        tmp_path_factory.mktemp("reference"),
        sizes,
        extra_args=("--sleep-on-idle",),
        env={START_METHOD: "fork"},
    )
    with server:
        yield Reference(server)


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    """A folder for one scenario's server logs and event logs."""
    return tmp_path / "logs"
