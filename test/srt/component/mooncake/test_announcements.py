"""Messages that only Mooncake ranks get; those of both backends: ``transfer``."""

from __future__ import annotations

import pytest

from component.transfer.messages import MOONCAKE
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.mooncake.conn import MooncakeKVSender

PEER = MOONCAKE.peer


@pytest.mark.hazard("leaking-room-records")
@pytest.mark.parametrize("empty", [False, True])
@pytest.mark.parametrize("dummy", [False, True, None])
def test_a_dummy_is_what_says_so(dummy: bool | None, empty: bool) -> None:
    """Guards against a full prefix hit taken for a dummy, whose decode rank would wait for its
    metadata, and against a dummy that is written to. A stock peer says it by two empty frames."""
    manager, reader = MOONCAKE.acquainted()
    pages = () if empty else (4, 5)
    slot = b"" if empty and dummy is not False else b"3"
    ours = dummy is not None
    reader.handle(MOONCAKE.announcement(pages=pages, slot=slot, ours=ours, is_dummy=bool(dummy)))
    info = manager.rooms.room(7).announcements[PEER]
    assert info.is_dummy is (empty if dummy is None else dummy)


def test_registering_again_ends_the_refusal() -> None:
    """Guards against a decode server that stays shut out after one failed transfer."""
    manager, reader = MOONCAKE.acquainted()
    reader.handle(MOONCAKE.announcement())
    manager.session_failed(manager.rooms.room(7).announcements[PEER])
    assert manager.has_failed_session(PEER) and not manager.decode_kv_args_table
    reader.handle(MOONCAKE.registration())
    assert not manager.has_failed_session(PEER) and not manager.session_failures


@pytest.mark.parametrize(("tokens", "fits"), [(9, True), (12, True), (8, False), (13, False)])
def test_a_decode_server_that_lists_tokens(tokens: int, fits: bool) -> None:
    """Guards against a decode server with ``--enable-hisparse``, whose requests all fail: its pool
    on the host has pages of one token, and prefill's are larger."""
    manager, reader = MOONCAKE.listener()
    manager.kv_args.page_size = 4
    reader.handle(MOONCAKE.registration(item=16, hisparse=b"1"))
    reader.handle(MOONCAKE.announcement(pages=tuple(range(20, 20 + tokens)), ours=False))
    sender = MooncakeKVSender(manager, "10.0.0.1:8998", 7, [0], 0)
    assert sender.poll() == KVPoll.WaitingForInput
    sender.init(3, 0)
    assert sender.poll() == (KVPoll.WaitingForInput if fits else KVPoll.Failed)
    assert sender.num_kv_indices == 3
