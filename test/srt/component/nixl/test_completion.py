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


@pytest.mark.hazard("writers-confused")
def test_one_note_says_it_all() -> None:
    """Guards against a room that waits for chunks, state or metadata of a writer which said that
    everything is here, and against one writer's note standing for another's."""
    note = done(5, 0, [b"metadata"])
    assert complete(note) and complete(note, note) and complete(note, expects_state=True)
    assert not complete(note, writers=2) and not complete(note, note, writers=2)
    assert complete(note, done(5, 1, []), writers=2)
    assert complete(note, b"5_kv_0_1_1", b"5_aux_1", writers=2), "an older prefill rank beside it"
    status = after(note, writers=2)
    assert not status.is_drained(2)
    status.stop(1)
    assert status.is_drained(2)


@pytest.mark.hazard("writers-confused")
def test_two_writers() -> None:
    """Guards against the first of two prefill ranks completing the room for both: the other's
    metadata would land in a slot that is used again."""
    texts = (b"5_kv_0_1_0", b"5_kv_0_0_1", b"5_kv_1_1_1", b"5_aux_0", b"5_aux_1")
    for order in permutations(texts):
        assert not complete(*order[:4], writers=2)
        assert complete(*order, writers=2)


def test_stages_of_a_stock_prefill() -> None:
    """Guards against a stock prefill with two pipeline stages, which does not say whose metadata
    came, that is never done, or done too early."""
    assert not complete(b"5_kv_0_1_0", b"5_aux", writers=2)
    assert complete(b"5_kv_0_1_0", b"5_kv_0_1_1", b"5_aux", writers=2)


@pytest.mark.hazard("full-hit-without-metadata")
def test_full_hit_of_one_of_two_writers() -> None:
    """Guards against "nothing to send" from one rank standing for the other one's chunks."""
    assert not complete(b"5_kv_0_1_0", b"5_aux_0", b"5_aux_1", writers=2)
    assert complete(b"5_kv_0_1_0", b"5_aux_0", b"5_aux_1", b"5_kv_0_1_1", writers=2)


@pytest.mark.hazard("metadata-tied-to-state")
def test_state_is_waited_for_only_where_it_is_expected() -> None:
    """Guards against dense models that wait for a state which nobody sends."""
    assert complete(b"5_kv_0_1_0", b"5_aux_0")
    assert not complete(b"5_kv_0_1_0", b"5_aux_0", expects_state=True)
    assert complete(b"5_kv_0_1_0", b"5_aux_0", b"5_state_0", expects_state=True)


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
