"""Two models of one shape over one Mooncake store; one is updated to the other's weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import requests

from component.buffer_only.masters import Master
from e2e import hicache
from e2e.hicache import Backend
from e2e.hicache_scenarios import questions
from e2e.support import Reference
from models.random_qwen3 import build

PAGE = hicache.page_size(16)


@pytest.mark.hazard("tenants-meet-in-store")
def test_models_meet_when_their_weights_are_the_same(
    model: Path, reference: Reference, tmp_path: Path
) -> None:
    """Mooncake's own keys have neither the model nor its weights in them: the second model would
    continue from the first one's KV, with every token wrong. After an update the old weights' pages
    must not be found, without the store being cleared; those of another server with the new weights
    are, though its files lie elsewhere."""
    asked = questions(model, reference, PAGE)
    prompts, expected = asked.some()
    master = Master()
    backend = Backend("mooncake", master.extra_config, {"MC_FORCE_TCP": "1"})
    twin = build(tmp_path / "elsewhere", seed=0)
    other_model = build(tmp_path / "other", seed=1)
    backends = [backend, Backend(**{**vars(backend), "model": other_model})]
    try:
        with hicache.servers(model, tmp_path, PAGE, backends, 4.0) as (one, other):
            others = other.generated(prompts)
            assert others != expected
            other.drained()

            answers = one.answers(prompts)
            assert [answer["output_ids"] for answer in answers] == expected
            assert not any(hicache.from_store(answers))
            one.drained()

            body = {"model_path": str(twin), "flush_cache": True}
            updated = requests.post(
                f"{other.url}/update_weights_from_disk", json=body, timeout=120
            ).json()
            assert updated["success"], updated
            answers = other.answers(prompts)
            assert [answer["output_ids"] for answer in answers] == expected
            assert all(hicache.from_store(answers))
            other.drained()
    finally:
        master.kill()
