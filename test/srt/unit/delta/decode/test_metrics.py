"""The gauges of the tree, and the refusals, as Prometheus sees them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import prometheus_client
import pytest

from sglang.srt.disaggregation.delta.decode import scheduler as metrics
from sglang.srt.disaggregation.delta.decode.record import record_of
from sglang.srt.disaggregation.delta.decode.scheduler import DecodeMetrics
from sglang.srt.disaggregation.delta.metrics import DECODE_GAUGES, FORMERLY, METRICS

LABELS = {"model_name": "m", "engine_type": "decode"}


def sample(name: str, **more: str) -> float | None:
    """What a scrape shows."""
    return prometheus_client.REGISTRY.get_sample_value(f"sglang:{name}", LABELS | more)


@pytest.fixture
def values(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """What the scheduler would show."""
    values = dict.fromkeys(DECODE_GAUGES, 0)
    monkeypatch.setattr(metrics, "readings", lambda scheduler: dict(values))
    return values


def test_gauges_follow_once_a_second(values: dict[str, int]) -> None:
    """Guards against gauges that cost time in every step, and against ones that stand still."""
    now = [100.0]
    decode = DecodeMetrics(clock=lambda: now[0])
    decode.bind(LABELS)
    for at, count, shown in ((0.0, 5, 5), (0.5, 6, 5), (0.99, 7, 5), (1.0, 8, 8), (1.5, 9, 8)):
        now[0] = 100.0 + at
        values["decode_prefix_leases"] = count
        decode.update(None)
        assert sample("decode_prefix_leases") == shown


def test_renamed_gauges_keep_their_old_names(values: dict[str, int]) -> None:
    """Guards against dashboards of the release before that are empty, or show another value."""
    renamed = [name for name in DECODE_GAUGES if name in FORMERLY]
    assert "kv_evictable_tokens" in renamed, "SGLang 0.5.23's name"
    decode = DecodeMetrics()
    decode.bind(LABELS)
    values.update((name, 7 + number) for number, name in enumerate(renamed))
    decode.update(None)
    help_of = {each.name: each.documentation for each in prometheus_client.REGISTRY.collect()}
    for name in renamed:
        assert sample(name) == sample(FORMERLY[name]) == values[name]
        assert help_of[f"sglang:{name}"] == METRICS[name].help
        assert help_of[f"sglang:{FORMERLY[name]}"] == f"Deprecated: use sglang:{name}"


def test_without_metrics_nothing_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a walk over all requests on a server that nobody scrapes."""

    def unread(scheduler: Any) -> dict[str, int]:
        raise AssertionError("read")

    monkeypatch.setattr(metrics, "readings", unread)
    DecodeMetrics().update(SimpleNamespace())


def test_refusals_by_reason() -> None:
    """Guards against one counter for all reasons: an operator must see what is short."""
    before = sample("decode_admission_refused_total", reason="no_tokens") or 0
    decode = DecodeMetrics()
    decode.refused("no_tokens")  # nobody scrapes yet
    decode.bind(LABELS)
    for reason in ("no_tokens", "no_tokens", "no_request_row"):
        decode.refused(reason)
    assert sample("decode_admission_refused_total", reason="no_tokens") == before + 2
    assert (sample("decode_admission_refused_total", reason="no_request_row") or 0) >= 1
    assert decode.refusals == {"no_tokens": 3, "no_request_row": 1}


def test_drafts_on_hits_and_misses() -> None:
    """Guards against drafts that are worse behind prefixes from the tree, and nobody can see it."""
    decode = DecodeMetrics()
    decode.bind(LABELS)

    def count(name: str, prefix: str) -> float:
        return sample(f"decode_spec_{name}_total", prefix=prefix) or 0

    def end(hit: int, steps: int, accepted: int) -> None:
        req = SimpleNamespace(spec_verify_ct=steps, spec_accepted_tokens=accepted)
        record_of(req).hit_tokens = hit  # type: ignore[arg-type]
        decode.speculated(req)

    end(64, 10, 7)
    end(16, 5, 1)
    end(0, 4, 2)
    end(0, 0, 0)  # it ended with its first token
    assert (count("verify_steps", "hit"), count("accepted_tokens", "hit")) == (15, 8)
    assert (count("verify_steps", "miss"), count("accepted_tokens", "miss")) == (4, 2)
