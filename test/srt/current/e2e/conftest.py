"""The talks with the answers of one aggregated server, for all tests of this folder."""

from __future__ import annotations

import pytest

from current.e2e.support import Talks, talks_of
from models.random_qwen3 import build


@pytest.fixture(scope="session")
def talks(tmp_path_factory: pytest.TempPathFactory) -> Talks:
    """See ``support.talks_of``."""
    model = build(tmp_path_factory.mktemp("model"))
    return talks_of(model, tmp_path_factory.mktemp("aggregated"))
