"""All ranks of a context parallel group send (``SGLANG_DISAGGREGATION_ALL_CP_RANKS_TRANSFER``)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from component.transfer.messages import DIALECTS, Dialect
from sglang.srt.disaggregation.base.conn import KVPoll

#: A prompt in a tree that has been used: its pages are no neighbours, nor in order.
CHUNKS = [[50, 51, 7, 9], [3, 90, 4]]


@pytest.mark.hazard("bad-kv-in-tree")
@pytest.mark.parametrize("say", DIALECTS, ids=repr)
def test_every_page_is_sent_by_one_rank(say: Dialect) -> None:
    """Guards against pages that no rank sends: each says that it is done, and decode shares what
    was in its pages before. SGLang's own function takes the pages of a chunk for neighbours."""
    sent: list[tuple[int, int]] = []
    last: list[bool] = []
    for rank in range(2):
        manager, reader = say.acquainted()
        manager.kv_args.page_size = 4
        manager.attn_cp_size, manager.attn_cp_rank = 2, rank
        manager.enable_all_cp_ranks_for_transfer = True
        reader.handle(say.announcement(pages=tuple(range(20, 27))))
        sender = say.sender(manager, "10.0.0.1:8998", 7, [0], 0)
        assert sender.poll() == KVPoll.WaitingForInput
        sender.init(7, 3)

        def queue(
            room: int, pages: Any, part: slice, is_last: bool, *rest: Any, **more: Any
        ) -> None:
            sent.extend(zip(range(7)[part], pages.tolist(), strict=True))
            last.append(is_last)

        manager.add_transfer_request = queue
        for chunk in CHUNKS:
            sender.send(np.array(chunk, np.int32))
    assert sorted(sent) == list(enumerate([page for chunk in CHUNKS for page in chunk]))
    assert last == [False, True] * 2
