"""Rooms over two real NIXL agents; prints one line for each scenario.

Run by ``test_transfers.py``, whose tests say what each scenario guards against.
"""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path

os.environ.setdefault("UCX_TLS", "tcp,self")
sys.path.insert(0, str(Path(__file__).parents[2]))

from component.nixl.pair import LIMIT_S, Pair, pages, until  # noqa: E402
from sglang.srt.disaggregation.base.conn import KVPoll  # noqa: E402
from sglang.srt.disaggregation.delta import wire  # noqa: E402
from sglang.srt.disaggregation.delta.stats import STATS  # noqa: E402

PAIR = Pair()
DONE = (KVPoll.Success, KVPoll.Success)
LOST = (KVPoll.Failed, KVPoll.Failed)
PAGE_BYTES = sum(PAIR.prefill.manager.kv_args.kv_item_lens)


def sent() -> int:
    """KV bytes posted so far."""
    return STATS.totals["kv_transfer_sent_bytes"]


def reason(endpoint) -> str:
    """Why a room failed, as the scheduler asks for it."""
    try:
        endpoint.failure_exception()
    except RuntimeError as error:
        return str(error)
    raise AssertionError("no failure")


def partial_delta() -> None:
    sender, receiver = PAIR.room()
    PAIR.prefill.aux[3] = 77
    before = sent()
    receiver.announce(pages(20, 9, 11), 5, prefix_len=8)
    PAIR.announced(sender)
    sender.init(5, 3)  # the whole prompt has 5 pages
    assert (sender.decode_prefix_len, sender.num_kv_indices) == (8, 3)
    sender.send(pages(30, 31))
    assert receiver.poll() == KVPoll.WaitingForInput
    sender.send(pages(2))
    assert PAIR.finish(sender, receiver) == DONE
    assert PAIR.arrived([30, 31, 2], [20, 9, 11])
    assert PAIR.decode.aux[5].tolist() == [77] * 16
    assert sent() - before == 3 * PAGE_BYTES
    sender.clear()
    receiver.clear()


def full_hit() -> None:
    sender, receiver = PAIR.room()
    PAIR.prefill.aux[1] = 41
    before = sent()
    receiver.announce(pages(), 2, prefix_len=12)
    PAIR.announced(sender)
    sender.init(3, 1)
    assert sender.num_kv_indices == 0
    sender.send(pages())
    assert PAIR.finish(sender, receiver) == DONE
    assert PAIR.arrived([], []) and PAIR.decode.aux[2].tolist() == [41] * 16
    assert sent() == before
    # Done is done, however often it is asked.
    assert {receiver.poll() for _ in range(3)} == {KVPoll.Success}
    sender.clear()
    receiver.clear()


def stock_peer() -> None:
    sender, receiver = PAIR.room()
    receiver.send_metadata(pages(1, 2), 0, None)
    PAIR.announced(sender)
    sender.init(2, 0)
    assert sender.decode_prefix_len == 0
    sender.send(pages(8, 9))
    assert PAIR.finish(sender, receiver) == DONE
    assert PAIR.arrived([8, 9], [1, 2])
    sender.clear()
    receiver.clear()


def mismatch() -> None:
    sender, receiver = PAIR.room()
    before = sent()
    receiver.announce(pages(20, 9, 11), 5, prefix_len=8)
    PAIR.announced(sender)
    sender.init(4, 3)  # decode counts a prompt of 5 pages
    sender.send(pages(30, 31))
    assert PAIR.finish(sender, receiver) == LOST
    for text in (reason(sender), reason(receiver)):
        assert "3 destination pages" in text and "2 of the prompt's 4" in text, text
    assert sent() == before and PAIR.arrived([], [])


def unreadable_frame() -> None:
    sender, receiver = PAIR.room()
    original, wire.VERSION = wire.VERSION, wire.VERSION + 1
    frame = wire.DeltaFrame(version=wire.VERSION, decode_prefix_len=8, num_pages=1, is_dummy=False)
    wire.VERSION = original
    encode = wire.encode_frame
    wire.encode_frame = lambda ours: encode(frame)
    try:
        receiver.announce(pages(7), 0, prefix_len=8)
    finally:
        wire.encode_frame = encode
    PAIR.announced(sender)
    sender.init(3, 0)
    assert PAIR.finish(sender, receiver) == LOST
    assert "delta protocol 2" in reason(sender) and "delta protocol 2" in reason(receiver)
    assert PAIR.arrived([], [])


def abort_on_prefill() -> None:
    sender, receiver = PAIR.room()
    receiver.announce(pages(20, 9), 5, prefix_len=8)
    PAIR.announced(sender)
    sender.init(4, 3)
    sender.abort()
    sender.send(pages(30, 31))
    assert PAIR.finish(sender, receiver) == LOST
    assert PAIR.arrived([], [])
    assert "prefill reported: aborted on the prefill server" in reason(receiver)
    assert reason(sender)


def post_raises() -> None:
    sender, receiver = PAIR.room()
    receiver.announce(pages(20, 9), 5, prefix_len=0)
    PAIR.announced(sender)
    sender.init(2, 3)
    agent = PAIR.prefill.manager.agent
    agent.initialize_xfer = lambda *arguments, **options: 1 / 0
    try:
        sender.send(pages(30, 31))
    finally:
        del agent.initialize_xfer
    assert {sender.poll() for _ in range(3)} == {KVPoll.Failed}
    assert PAIR.finish(sender, receiver) == LOST
    assert "ZeroDivisionError" in reason(sender)
    assert "prefill reported" in reason(receiver)


def late_notification() -> None:
    sender, receiver = PAIR.room()
    receiver.announce(pages(4), 5, prefix_len=0)
    PAIR.announced(sender)
    receiver.abort()
    assert receiver.poll() == KVPoll.Failed and "Abort" in reason(receiver)
    sender.init(1, 3)
    sender.send(pages(30))
    until(lambda: sender.poll() == KVPoll.Success, "sender")
    sender.clear()
    # The next room's polls read what arrived for the one before.
    PAIR.wipe()
    sender, receiver = PAIR.room()
    receiver.announce(pages(6), 5, prefix_len=0)
    PAIR.announced(sender)
    sender.init(1, 3)
    sender.send(pages(31))
    assert PAIR.finish(sender, receiver) == DONE
    assert PAIR.arrived([31], [6])
    sender.clear()
    receiver.clear()


def given_up_while_written() -> None:
    sender, receiver = PAIR.room()
    receiver.announce(pages(4, 5), 5, prefix_len=0)
    PAIR.announced(sender)
    sender.init(2, 3)
    sender.send(pages(30))
    until(lambda: PAIR.arrived([30], [4]), "first page")
    receiver.abort()
    assert receiver.poll() == KVPoll.Failed
    watch = receiver.hold()
    assert "Abort" in reason(receiver)
    assert not watch.quiet()  # the second page is still to come
    sender.send(pages(31))
    until(lambda: sender.poll() == KVPoll.Success, "sender")
    until(watch.quiet, "quiet")
    assert PAIR.arrived([30, 31], [4, 5])
    watch.close()
    sender.clear()


def given_up_and_refused() -> None:
    sender, receiver = PAIR.room()
    receiver.announce(pages(4, 5), 5, prefix_len=0)
    PAIR.announced(sender)
    sender.init(2, 3)
    sender.send(pages(30))
    receiver.abort()
    watch = receiver.hold()
    assert "Abort" in reason(receiver) and not watch.quiet()
    sender.abort()  # tells decode, but only when the first page has arrived
    until(lambda: sender.poll() == KVPoll.Failed, "sender")
    until(watch.quiet, "quiet")
    assert PAIR.arrived([30], [4])
    watch.close()
    assert reason(sender)


def announced_after_the_failure() -> None:
    sender, receiver = PAIR.room()
    sender.abort()
    assert sender.poll() == KVPoll.Failed and reason(sender)
    receiver.announce(pages(4), 5, prefix_len=0)
    until(lambda: receiver.poll() == KVPoll.Failed, "notice")
    assert receiver.hold() is None
    assert "aborted on the prefill server" in reason(receiver)


def never_announced() -> None:
    sender, receiver = PAIR.room()
    PAIR.prefill.manager.bootstrap_timeout = 0
    assert sender.poll() == KVPoll.Failed
    PAIR.prefill.manager.bootstrap_timeout = LIMIT_S
    assert "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT" in reason(sender)
    receiver.clear()


SCENARIOS = (
    partial_delta,
    full_hit,
    stock_peer,
    mismatch,
    unreadable_frame,
    abort_on_prefill,
    post_raises,
    late_notification,
    given_up_while_written,
    given_up_and_refused,
    announced_after_the_failure,
    never_announced,
)

for scenario in SCENARIOS:
    PAIR.wipe()
    try:
        scenario()
        assert not PAIR.leftovers(), PAIR.leftovers()
        print("PASSED", scenario.__name__, flush=True)
    except Exception:
        print("FAILED", scenario.__name__, traceback.format_exc(), flush=True)
# NIXL crashes an interpreter without a GPU driver at exit, after all work is done.
os._exit(0)
