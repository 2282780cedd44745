"""Which requests may match, and whose KV may enter the tree."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from sglang.srt.disaggregation.decode_radix import eligibility

FAKE_HOST = "2.2.2.2"


@pytest.fixture(autouse=True)
def _upstream(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one upstream constant, without importing SGLang."""
    stub = SimpleNamespace(FAKE_BOOTSTRAP_HOST=FAKE_HOST)
    monkeypatch.setitem(sys.modules, "sglang.srt.disaggregation.utils", stub)


def request(**changes: object) -> SimpleNamespace:
    """An ordinary request with changes."""
    fields = {"bootstrap_host": "10.0.0.1", "input_embeds": None, "multimodal_inputs": None}
    return SimpleNamespace(**fields | changes)


def test_an_ordinary_request_shares_after_its_transfer() -> None:
    """Guards against KV that enters the tree before it has arrived."""
    req = request()
    assert eligibility.may_match(req) and not eligibility.may_insert(req)
    eligibility.mark_committed(req)
    assert eligibility.may_insert(req)


@pytest.mark.parametrize("host", [FAKE_HOST, None])
def test_warm_up_and_health_requests_never_share(host: str | None) -> None:
    """Guards against the garbage of a warm-up request answering a prompt that begins alike."""
    req = request(bootstrap_host=host)
    eligibility.mark_committed(req)
    assert eligibility.is_fake(req)
    assert not eligibility.may_match(req) and not eligibility.may_insert(req)


@pytest.mark.parametrize("field", ["input_embeds", "multimodal_inputs"])
def test_placeholder_ids_never_share(field: str) -> None:
    """Guards against two images, or two embeddings, behind the same token ids."""
    req = request(**{field: object()})
    eligibility.mark_committed(req)
    assert not eligibility.is_fake(req)
    assert not eligibility.may_match(req) and not eligibility.may_insert(req)
