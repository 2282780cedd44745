"""Which requests may match, and whose KV may enter the tree."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from sglang.srt.disaggregation.delta.decode import record
from sglang.srt.disaggregation.delta.decode.record import record_of

FAKE_HOST = "2.2.2.2"


@pytest.fixture(autouse=True)
def _upstream(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one upstream constant, without importing SGLang."""
    stub = SimpleNamespace(FAKE_BOOTSTRAP_HOST=FAKE_HOST)
    monkeypatch.setitem(sys.modules, "sglang.srt.disaggregation.utils", stub)


def request(**changes: object) -> SimpleNamespace:
    """An ordinary request with changes."""
    fields = {
        "bootstrap_host": "10.0.0.1",
        "input_embeds": None,
        "multimodal_inputs": None,
        "origin_input_ids": [1, 2, 3],
    }
    return SimpleNamespace(**fields | changes)


def test_an_ordinary_request_shares_after_its_transfer() -> None:
    """Guards against KV that enters the tree before it has arrived."""
    req = request()
    assert record.may_match(req) and not record.may_insert(req)
    record_of(req).committed = True
    assert record.may_insert(req)


@pytest.mark.parametrize("host", [FAKE_HOST, None])
def test_warm_up_and_health_requests_never_share(host: str | None) -> None:
    """Guards against the garbage of a warm-up request answering a prompt that begins alike."""
    req = request(bootstrap_host=host)
    record_of(req).committed = True
    assert record.is_fake(req)
    assert not record.may_match(req) and not record.may_insert(req)


def test_input_embeddings_never_share() -> None:
    """Guards against two embeddings behind the same token ids: SGLang fills in ones."""
    req = request(input_embeds=[[0.5]])
    record_of(req).committed = True
    assert not record.is_fake(req)
    assert not record.may_match(req) and not record.may_insert(req)


def item(pad_value: int | None, *offsets: tuple[int, int]) -> SimpleNamespace:
    """An image of a request; an offset is its first and last token."""
    return SimpleNamespace(pad_value=pad_value, offsets=list(offsets) or None)


CAT, DOG, PLACEHOLDER = 1_000_001, 1_000_002, 7


@pytest.mark.hazard("tenants-share")
@pytest.mark.parametrize(
    ("token_ids", "items", "shares"),
    [
        ([1, CAT, CAT, 2], [item(CAT, (1, 2))], True),
        ([1, CAT, CAT, 2], [item(CAT)], True),
        ([CAT, 1, DOG], [item(CAT, (0, 0)), item(DOG, (2, 2))], True),
        ([CAT, 1, CAT], [item(CAT, (0, 0), (2, 2))], True),
        ([1, 2], [], True),
        ([1, PLACEHOLDER, PLACEHOLDER, 2], [item(CAT, (1, 2))], False),
        ([1, PLACEHOLDER, PLACEHOLDER, 2], [item(CAT)], False),
        ([1, PLACEHOLDER, 2], [item(None, (1, 1))], False),
        ([CAT, 1, PLACEHOLDER], [item(CAT, (0, 0)), item(CAT, (2, 2))], False),
        ([CAT, 1, PLACEHOLDER], [item(CAT, (0, 0), (2, 2))], False),
        ([CAT, 1], [item(CAT, (0, 0)), item(DOG, (2, 2))], False),
    ],
)
def test_images_share_by_their_content(
    token_ids: list[int], items: list[SimpleNamespace], shares: bool
) -> None:
    """Guards against two images behind the same token ids, where a model does not put the hash of
    each into the prompt, and against sharing none where it does."""
    req = request(origin_input_ids=token_ids, multimodal_inputs=SimpleNamespace(mm_items=items))
    record_of(req).committed = True
    for _ in range(2):
        assert record.may_match(req) == record.may_insert(req) == shares
        req.multimodal_inputs = None  # as SGLang does when a request ends
