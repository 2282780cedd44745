"""When a room is complete, and when it is quiet, on a decode rank."""

from __future__ import annotations

import time
from itertools import permutations
from typing import Any

import pytest

from component.transfer.bare import ADDRESS, decode
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.delta import wire
from sglang.srt.disaggregation.delta.decode.deferred_free import DeferredFree
from sglang.srt.disaggregation.delta.wire import done, parse
from sglang.srt.disaggregation.nixl import conn
from sglang.srt.disaggregation.nixl.conn import TransferInfo, TransferStatus


def after(*texts: bytes, writers: int = 1, expects_state: bool = False) -> Any:
    """The room's status after these notifications."""
    status = TransferStatus()
    status.expects_state = expects_state
    for text in texts:
        status.take(parse(text), writers)
    return status


def complete(*texts: bytes, writers: int = 1, expects_state: bool = False) -> bool:
    """Whether the room is done after these notifications."""
    return bool(after(*texts, writers=writers, expects_state=expects_state).is_done())


@pytest.mark.hazard("chunks-overtake", "writers-confused")
@pytest.mark.parametrize("aux", [b"5_aux_0", b"5_aux"])
def test_every_order_ends_with_the_last_event(aux: bytes) -> None:
    """Guards against a room that is complete before its last chunk, or its metadata, has arrived;
    in any order, with repetitions; from a stock prefill and from ours."""
    texts = (b"5_kv_0_0_0", b"5_kv_1_1_0", aux)
    for order in permutations(texts):
        for count in range(1, 3):
            assert not complete(*order[:count], *order[:count])
        assert complete(*order) and complete(*order, *order)


NOTE = done(5, 0, [b"metadata"])


@pytest.mark.hazard("writers-confused", "full-hit-without-metadata", "metadata-tied-to-state")
@pytest.mark.parametrize(
    ("texts", "writers", "expects_state", "expected"),
    [
        # One note of a writer stands for its chunks, state and metadata, and for no other writer's.
        ([NOTE], 1, False, True),
        ([NOTE, NOTE], 1, False, True),
        ([NOTE], 1, True, True),
        ([NOTE], 2, False, False),
        ([NOTE, NOTE], 2, False, False),
        ([NOTE, done(5, 1, [])], 2, False, True),
        ([NOTE, b"5_kv_0_1_1", b"5_aux_1"], 2, False, True),  # an older prefill rank beside it
        # A stock prefill with two pipeline stages does not say whose metadata came.
        ([b"5_kv_0_1_0", b"5_aux"], 2, False, False),
        ([b"5_kv_0_1_0", b"5_kv_0_1_1", b"5_aux"], 2, False, True),
        # "Nothing to send" of one rank does not stand for the other one's chunks.
        ([b"5_kv_0_1_0", b"5_aux_0", b"5_aux_1"], 2, False, False),
        ([b"5_kv_0_1_0", b"5_aux_0", b"5_aux_1", b"5_kv_0_1_1"], 2, False, True),
        # State is waited for where it is expected; dense models have none.
        ([b"5_kv_0_1_0", b"5_aux_0"], 1, False, True),
        ([b"5_kv_0_1_0", b"5_aux_0"], 1, True, False),
        ([b"5_kv_0_1_0", b"5_aux_0", b"5_state_0"], 1, True, True),
    ],
)
def test_what_completes_a_room(
    texts: list[bytes], writers: int, expects_state: bool, expected: bool
) -> None:
    """Guards against a room that never ends, and against one that ends early: the request would
    start on KV or metadata that are not there."""
    assert complete(*texts, writers=writers, expects_state=expects_state) is expected


@pytest.mark.hazard("writers-confused")
def test_drained_when_the_writer_without_a_note_has_stopped() -> None:
    """Guards against pages that stay held for a writer which said that it writes no more."""
    status = after(NOTE, writers=2)
    assert not status.is_drained(2)
    status.stop(1)
    assert status.is_drained(2)


@pytest.mark.hazard("writers-confused")
def test_two_writers_in_any_order() -> None:
    """Guards against the first of two prefill ranks completing the room for both: the other's
    metadata would land in a slot that is used again."""
    texts = (b"5_kv_0_1_0", b"5_kv_0_0_1", b"5_kv_1_1_1", b"5_aux_0", b"5_aux_1")
    for order in permutations(texts):
        assert not complete(*order[:4], writers=2)
        assert complete(*order, writers=2)


def test_a_failed_room_is_not_done() -> None:
    """Guards against a room that counts as delivered because its prefill server died."""
    status = after(b"5_kv_0_0_0")
    status.is_failure = True
    assert not status.is_done() and status.is_failed()
    for text in (b"5_kv_1_1_0", b"5_aux_0"):
        status.take(parse(text), 1)
    assert status.is_done()


def test_quiet_when_each_writer_has_delivered_or_stopped() -> None:
    """Guards against pages given away when one of two ranks stopped and the other still writes."""
    status = after(b"5_kv_0_0_0", b"5_kv_1_1_1", writers=2)
    status.stop(0)
    status.stop(0)
    assert not status.is_drained(2)
    for text in (b"5_kv_0_0_1", b"5_aux_1"):
        status.take(parse(text), 2)
    assert status.is_drained(2) and not status.is_done()


def message(indices: bytes, *frames: bytes) -> list[bytes]:
    """A metadata message as prefill's reader gets it."""
    return [b"5", b"10.0.0.1", b"4711", b"agent", indices, b"9", b"1", b"", *frames]


@pytest.mark.hazard("leaking-room-records")
@pytest.mark.parametrize("dummy", [False, True])
@pytest.mark.parametrize("indices", [b"", b"\x03\0\0\0"])
def test_a_dummy_says_so(dummy: bool, indices: bytes) -> None:
    """Guards against a full prefix hit that looks like a dummy and gets no metadata, and against a
    dummy with a prefix that looks real and gets some."""
    frame = wire.DeltaFrame(
        decode_prefix_len=16, num_pages=len(indices) // 4, is_dummy=dummy, num_writers=1
    )
    info = TransferInfo.from_zmq(message(indices, wire.encode_frame(frame)))
    assert info.is_dummy() is dummy and info.delta == frame


def test_stock_announcement() -> None:
    """Guards against a stock peer's dummy, known by its empty list, getting metadata."""
    assert TransferInfo.from_zmq(message(b"")).is_dummy()
    info = TransferInfo.from_zmq(message(b"\x03\0\0\0"))
    assert not info.is_dummy() and info.delta is None and info.delta_error is None


def test_stock_prefill_reads_our_announcement() -> None:
    """Guards against a frame that an unpatched prefill server stumbles over."""
    stock = next(
        cls for cls in TransferInfo.__mro__[1:] if cls.__module__ == TransferInfo.__module__
    )
    frame = wire.DeltaFrame(decode_prefix_len=0, num_pages=1, is_dummy=False)
    info = stock.from_zmq(message(b"\x03\0\0\0", wire.encode_frame(frame)))
    assert info.dst_kv_indices.tolist() == [3] and not hasattr(info, "delta")


def test_damaged_frame_is_kept_for_its_room() -> None:
    """Guards against one bad announcement ending the thread that reads all of them, and against it
    counting as a dummy, which would be skipped in silence."""
    info = TransferInfo.from_zmq(message(b"", b"sglang-delta:\xc1"))
    assert info.delta is None and "malformed" in info.delta_error
    assert not info.is_dummy()


def test_notifications_that_cannot_be_read(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards against an error of the transport that ends the scheduler, which polls: rooms end by
    their deadline, pages of rooms that were given up stay held, and the log does not fill up."""
    manager = decode("nixl", 7, writers=1)
    manager.waiting_timeout = 30

    def broken() -> Any:
        raise RuntimeError("NIXL_ERR_BACKEND")

    monkeypatch.setattr(manager.agent, "get_new_notifs", broken)
    receiver = conn.NixlKVReceiver.__new__(conn.NixlKVReceiver)
    receiver.__dict__.update(
        kv_mgr=manager, bootstrap_room=7, bootstrap_addr=ADDRESS, conclude_state=None,
        started_transfer=True, init_time=time.time(), required_prefill_response_num=1,
    )  # fmt: skip
    for _ in range(100):
        assert receiver.poll() == KVPoll.WaitingForInput
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert line.startswith("could not read NIXL notifications: RuntimeError('NIXL_ERR_BACKEND')")
    receiver.init_time -= 31
    assert receiver.poll() == KVPoll.Failed
    assert "WAITING_TIMEOUT" in manager.failure_records[7]
    deferred = DeferredFree(manager, 7, ADDRESS, manager.progress(7), 1)
    assert not deferred.is_drained()
