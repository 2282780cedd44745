"""Announcements of decode ranks: their numbers are checked before any is used."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sglang.srt.disaggregation.delta.peer_messages import (
    BadMessage,
    check_announcement,
    check_registration,
)
from sglang.srt.disaggregation.delta.wire import DeltaFrame, metadata_fit

GOOD = {
    "kv_buffers": 4,
    "state_buffers": 0,
    "aux_buffers": 2,
    "tp_size": 2,
    "tp_rank": 1,
    "item_len": 64,
}


def register(
    mla: bool = False,
    lens: tuple[int, ...] = (64,) * 4,
    state: int = 0,
    pp: int = 1,
    **changes: Any,
) -> None:
    """Check a registration at a prefill rank of two, with four KV and two metadata buffers, and
    ``state`` buffers of state; ``pp``: pipeline stages."""
    kv_args = SimpleNamespace(
        kv_data_ptrs=[1] * 4,
        aux_data_ptrs=[1] * 2,
        kv_item_lens=lens,
        state_data_ptrs=[1] * state,
    )
    rank: Any = SimpleNamespace(kv_args=kv_args, is_mla=mla, tp_size=2, pp_size=pp)
    check_registration(rank, **(GOOD | changes))


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"kv_buffers": 3}, "3 KV buffers, this prefill rank has 4"),
        ({"aux_buffers": 1}, "1 metadata buffers, this prefill rank has 2"),
        ({"aux_buffers": 3}, "3 metadata buffers, this prefill rank has 2"),
        (
            {"state_buffers": 2},
            "4 KV buffers and 2 buffers of state, this prefill rank has 4 and 0",
        ),
        (
            {"state": 2, "kv_buffers": 8},
            "8 KV buffers and 0 buffers of state, this prefill rank has 4 and 2",
        ),
        ({"state": 2, "state_buffers": 3}, "3 buffers of state, this prefill rank has 4 and 2"),
        ({"tp_size": 0}, "rank 1 of 0"),
        ({"tp_rank": -1}, "rank -1 of 2"),
        ({"item_len": 128}, "128 bytes, this prefill rank's 64"),
        ({"item_len": 0}, "0 bytes"),
        ({"item_len": -64}, "-64 bytes"),
        ({"item_len": 0, "tp_size": 4}, "0 bytes"),
        ({"item_len": 32, "tp_size": 4, "mla": True}, "32 bytes"),
        (
            {"lens": (64, 64, 64, 64, 32, 32), "tp_size": 4},
            "draft model and of the target differ in size",
        ),
    ],
)
def test_a_registration_that_does_not_fit(changes: dict[str, Any], complaint: str) -> None:
    """Guards against writes to wrong addresses: another model, page size or KV type on decode, or
    fewer buffers than prefill writes."""
    with pytest.raises(BadMessage, match=complaint):
        register(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"kv_buffers": 6},  # decode has draft layers as well
        {"item_len": 32, "tp_size": 4},  # half of the heads
        {"item_len": None},
        {"state": 2, "state_buffers": 2},
        {"state": 0, "state_buffers": 2, "pp": 2},  # the buffers of another stage
        {"lens": (64, 64, 64, 64, 32, 32)},  # a draft of other heads, between equal sizes
        {"lens": (64, 64, 48, 48, 64, 48), "item_len": 32, "tp_size": 4},  # a draft like the target
        {"tp_rank": 3},  # an engine rank, over all data parallel groups
    ],
)
def test_registrations_that_fit(changes: dict[str, Any]) -> None:
    """Guards against refused peers that SGLang serves."""
    register(**changes)


@pytest.mark.parametrize(
    ("buffer", "sent", "wanted", "fits"),
    [
        (0, 64, 64, True),
        (0, 64, 512, False),
        (8, 768, 768, True),
        (8, 64, 768, True),  # prefill has no draft model
        (8, 128, 768, False),
        (8, 64, 32, False),
    ],
)
def test_metadata_that_fit(buffer: int, sent: int, wanted: int, fits: bool) -> None:
    """Guards against bytes beyond a slot, and against a prefill server without a draft model whose
    rooms all fail: it sends a stub for the hidden states."""
    assert metadata_fit(buffer, sent, wanted) == fits


def announce(pages: Any = (3, 9), slot: int | None = 0, needed: int = 1, **frame: Any) -> None:
    """Check an announcement; ``frame``: fields of its delta frame; without any it has no frame."""
    delta = None
    if frame:
        fields = {"decode_prefix_len": 0, "num_pages": len(pages), "is_dummy": False} | frame
        delta = DeltaFrame(**fields)
    check_announcement(
        SimpleNamespace(
            room=7,
            dst_kv_indices=np.array(pages, dtype=np.int32),
            dst_aux_index=slot,
            required_dst_info_num=needed,
            delta=delta,
        )
    )


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"pages": (3, -1)}, "page is negative"),
        ({"pages": (3, 4, 3)}, "listed twice"),
        ({"slot": -1}, "index is negative"),
        ({"needed": 0}, "count"),
        ({"num_pages": 3}, "2 destination pages came, 3 were sent"),
        ({"pool_pages": 9}, "page 9, but decode's pool has 9"),
        ({"slot": 8, "metadata_slots": 8}, "slot 8, but decode has 8"),
    ],
)
def test_an_invalid_announcement(changes: dict[str, Any], complaint: str) -> None:
    """Guards against writes outside decode's pools, or twice to one page; the log has the
    numbers."""
    with pytest.raises(BadMessage, match=complaint):
        announce(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"pages": (), "num_pages": 0},
        {"pages": (9, 3, 0), "pool_pages": 10},
        {"slot": 7, "metadata_slots": 8},
        {"slot": 10**6, "pages": (2**31 - 1,), "pool_pages": 0},  # a peer that omits its sizes
        {"slot": None},
    ],
)
def test_valid_announcements(changes: dict[str, Any]) -> None:
    """Guards against refused rooms at the limits, full hits among them."""
    announce(**changes)
