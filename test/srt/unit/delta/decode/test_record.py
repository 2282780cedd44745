"""Which requests may match, and whose KV may enter the tree."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sglang.srt.disaggregation.delta.decode import record
from sglang.srt.disaggregation.delta.decode.record import record_of
from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST


def request(**changes: object) -> Any:
    """An ordinary request with changes."""
    fields = {
        "bootstrap_host": "10.0.0.1",
        "input_embeds": None,
        "multimodal_inputs": None,
        "origin_input_ids": [1, 2, 3],
    }
    return SimpleNamespace(**fields | changes)


@pytest.mark.parametrize(
    ("changes", "is_fake", "shares"),
    [
        pytest.param({}, False, True, id="an ordinary one"),
        # The garbage of a warm-up must not answer a prompt that begins alike.
        pytest.param({"bootstrap_host": FAKE_BOOTSTRAP_HOST}, True, False, id="a warm-up"),
        pytest.param({"bootstrap_host": None}, True, False, id="a health check"),
        # SGLang fills in ones for the token ids of all embeddings.
        pytest.param({"input_embeds": [[0.5]]}, False, False, id="input embeddings"),
    ],
)
def test_who_shares(changes: dict[str, object], is_fake: bool, shares: bool) -> None:
    """Guards against garbage, or KV of other embeddings, that is shared; and against KV that enters
    the tree before it has arrived."""
    req = request(**changes)
    assert record.is_fake(req) is is_fake
    assert (record.may_match(req), record.may_insert(req)) == (shares, False)
    record_of(req).committed = True
    assert (record.may_match(req), record.may_insert(req)) == (shares, shares)


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
