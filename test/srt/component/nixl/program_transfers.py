"""Rooms over two real NIXL agents; prints one line for each scenario.

Run by ``test_transfers.py``, whose tests say what each scenario guards against.
"""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

os.environ.setdefault("UCX_TLS", "tcp,self")
sys.path.insert(0, str(Path(__file__).parents[2]))

from component.nixl.pair import ADDRESS, LIMIT_S, Pair, pages, until  # noqa: E402
from sglang.srt.disaggregation.base.conn import KVPoll  # noqa: E402
from sglang.srt.disaggregation.delta import wire  # noqa: E402
from sglang.srt.disaggregation.delta.metrics import STATS  # noqa: E402

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
    assert receiver.defer_free() is None
    assert "prefill reported: aborted on the prefill server" in reason(receiver)
    assert reason(sender)


@contextmanager
def agent_that(**calls):
    """Prefill's NIXL agent with some of its calls replaced."""
    agent = PAIR.prefill.manager.agent
    agent.__dict__.update(calls)
    try:
        yield agent
    finally:
        for name in calls:
            del agent.__dict__[name]


@contextmanager
def doubt_of(seconds):
    """How long a transfer that was broken off counts as under way."""
    workers = [thread._worker for thread in PAIR.prefill.manager.transfers._threads]
    kept = workers[0]._doubt_s
    for worker in workers:
        worker._doubt_s = seconds
    try:
        yield
    finally:
        for worker in workers:
            worker._doubt_s = kept


@contextmanager
def counted(*names):
    """Calls of prefill's agent meanwhile."""
    agent, calls = PAIR.prefill.manager.agent, Counter()

    def count(name):
        method = getattr(type(agent), name)

        def call(*arguments, **options):
            calls[name] += 1
            return method(agent, *arguments, **options)

        return call

    with agent_that(**{name: count(name) for name in names}):
        yield calls


def raises(*arguments, **options):
    """As NIXL's binding does when it does not like something."""
    raise ZeroDivisionError


def post_raises() -> None:
    for call in ("make_prepped_xfer", "transfer"):
        sender, receiver = PAIR.room()
        receiver.announce(pages(20, 9), 5, prefix_len=0)
        PAIR.announced(sender)
        sender.init(2, 3)
        with doubt_of(0.1), agent_that(**{call: raises}):
            sender.send(pages(30, 31))
            assert PAIR.finish(sender, receiver) == LOST
        assert {sender.poll() for _ in range(3)} == {KVPoll.Failed}
        try:
            sender.failure_exception()
        except RuntimeError as error:
            assert "ZeroDivisionError" in str(error), error
            assert isinstance(error.__cause__, ZeroDivisionError)
        assert "prefill reported" in reason(receiver)
        assert PAIR.arrived([], [])


def no_prepared_lists() -> None:
    backend = PAIR.prefill.manager.transfers.backend
    for lists in (backend._lists, PAIR.prefill.manager.peers.hold("decode").lists):
        lists._lists.clear()
    try:
        with agent_that(prep_xfer_dlist=raises):
            partial_delta()
        with agent_that(prep_xfer_dlist=only_rows_of_three):
            for lists in (backend._lists, PAIR.prefill.manager.peers.hold("decode").lists):
                lists._lists.clear()
            PAIR.wipe()
            partial_delta()
    finally:
        peer = PAIR.prefill.manager.peers.hold("decode")
        for _ in range(peer.users):
            PAIR.prefill.manager.peers.release(peer)


def only_rows_of_three(name, rows, memory):
    """An older NIXL, which does not know the strided form."""
    if rows.shape[1] != 3:
        raise ValueError("rows of three")
    return type(PAIR.prefill.manager.agent).prep_xfer_dlist(
        PAIR.prefill.manager.agent, name, rows, memory
    )


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


def withdrawn_while_written() -> None:
    sender, receiver = PAIR.room()
    receiver.announce(pages(4, 5), 5, prefix_len=0)
    PAIR.announced(sender)
    sender.init(2, 3)
    sender.send(pages(30))
    until(lambda: PAIR.arrived([30], [4]), "first chunk")
    receiver.abort()
    assert receiver.poll() == KVPoll.Failed
    deferred = receiver.defer_free()  # tells prefill
    assert "Abort" in reason(receiver)
    until(lambda: sender.is_stopped, "withdrawal")
    sender.send(pages(31))  # not posted any more
    until(lambda: sender.poll() == KVPoll.Failed, "sender")
    until(deferred.is_drained, "quiet")
    assert PAIR.arrived([30], [4])
    assert "decode gave it up" in reason(sender)
    deferred.stop_following()


def withdrawn_when_all_was_sent() -> None:
    sender, receiver = PAIR.room()
    receiver.announce(pages(4), 5, prefix_len=0)
    PAIR.announced(sender)
    sender.init(1, 3)
    sender.send(pages(30))
    until(lambda: sender.poll() == KVPoll.Success, "sender")
    sender.clear()
    receiver.abort()
    deferred = receiver.defer_free()
    assert deferred is None or until(deferred.is_drained, "quiet") is None
    assert reason(receiver)
    if deferred is not None:
        deferred.stop_following()


def withdrawn_before_the_request_came() -> None:
    room = PAIR.next_room()
    receiver = PAIR.receiver(room)
    receiver.withdraw("the client went away")
    rooms = PAIR.prefill.manager.rooms
    until(lambda: rooms._ended.get(room), "withdrawal")
    sender = PAIR.sender(room)
    assert sender.poll() == KVPoll.Failed
    assert "decode gave it up: the client went away" in reason(sender)
    receiver.clear()


def given_up_and_refused() -> None:
    sender, receiver = PAIR.room()
    receiver.announce(pages(4, 5), 5, prefix_len=0)
    PAIR.announced(sender)
    sender.init(2, 3)
    with agent_that(check_xfer_state=lambda handle: "PROC"):
        sender.send(pages(30))
        until(lambda: PAIR.arrived([30], [4]), "first chunk")
        sender.abort()  # tells decode, but only when NIXL says that the first page has arrived
        assert {sender.poll() for _ in range(3)} == {KVPoll.Transferring}
        assert receiver.poll() != KVPoll.Failed
    until(lambda: receiver.poll() == KVPoll.Failed, "notice")
    until(lambda: sender.poll() == KVPoll.Failed, "sender")
    assert PAIR.arrived([30], [4])
    assert receiver.defer_free() is None, "all that prefill would write has arrived"
    assert reason(sender) and "aborted on the prefill server" in reason(receiver)


def room_number_still_in_use() -> None:
    sender, receiver = PAIR.room()
    receiver.announce(pages(4, 5), 5, prefix_len=0)
    PAIR.announced(sender)
    sender.init(2, 3)
    with agent_that(check_xfer_state=lambda handle: "PROC"):
        sender.send(pages(30))  # and is under way from here on
        until(lambda: PAIR.arrived([30], [4]), "first chunk")
        receiver.abort()
        deferred = receiver.defer_free()
        assert reason(receiver)
        again = PAIR.receiver(sender.bootstrap_room)
        assert again.poll() == KVPoll.Failed and "still in use" in reason(again)
        until(lambda: sender.is_stopped, "withdrawal")
        assert not deferred.is_drained()
    until(lambda: sender.poll() == KVPoll.Failed, "settled")
    assert reason(sender)
    until(deferred.is_drained, "quiet")
    deferred.stop_following()


def prefill_rank_is_a_new_one() -> None:
    sender, receiver = PAIR.room()
    known = PAIR.prefill.manager.decode_kv_args_table
    agent, info = known.popitem()
    connections = dict(PAIR.decode.manager.connection_pool)
    servers = dict(PAIR.decode.manager.prefill_info_table)
    receiver.announce(pages(4), 5, prefix_len=0)
    until(lambda: receiver.poll() == KVPoll.Failed, "notice")
    assert receiver.defer_free() is None, "a rank that knows nothing of us writes nothing"
    assert "does not know the decode rank" in reason(receiver)
    until(lambda: not PAIR.decode.manager.connection_pool, "it connects again next time")
    known[agent] = info
    PAIR.decode.manager.connection_pool.update(connections)
    PAIR.decode.manager.prefill_info_table.update(servers)
    sender.abort()
    assert sender.poll() == KVPoll.Failed and reason(sender)


def prefill_is_gone() -> None:
    sender, receiver = PAIR.room()
    receiver.announce(pages(4), 5, prefix_len=0)
    PAIR.announced(sender)
    manager = PAIR.decode.manager
    kept = dict(manager.connection_pool), dict(manager.prefill_info_table)
    manager.servers.lost(ADDRESS, False, "silent")
    assert receiver.poll() == KVPoll.Failed
    PAIR.prefill.manager.rooms.enter(sender.bootstrap_room)  # it never answers
    deferred = receiver.defer_free()
    assert f"lost prefill server {ADDRESS}: silent" in reason(receiver)
    assert not deferred.is_drained(), "silence is no proof"
    manager.servers.lost(ADDRESS, True, "refused")
    assert deferred.is_drained()
    deferred.stop_following()
    PAIR.prefill.manager.rooms.leave(sender.bootstrap_room)
    sender.abort()
    assert sender.poll() == KVPoll.Failed and reason(sender)
    manager.connection_pool.update(kept[0])
    manager.prefill_info_table.update(kept[1])
    manager.servers._epochs[ADDRESS] += 1  # what the next handshake does


def transfer_that_never_settles() -> None:
    """Until the room is given up: then it lands, from pages that are others' by now."""
    sender, receiver = PAIR.room()
    receiver.announce(pages(4), 5, prefix_len=0)
    PAIR.announced(sender)
    sender.init(1, 3)
    rooms = PAIR.prefill.manager.rooms
    manager = PAIR.prefill.manager
    allowed, manager.transfer_s = manager.transfer_s, 0.2
    kept = [layer[30].clone() for layer in PAIR.prefill.kv]
    try:
        with agent_that(check_xfer_state=lambda handle: "PROC"):
            sender.send(pages(30))
            until(lambda: sender.poll() == KVPoll.Failed, "deadline")
            text = reason(sender)
            assert "SGLANG_DISAGGREGATION_TRANSFER_TIMEOUT" in text and "decode" in text, text
            assert rooms.numbers(), "what is under way is waited for"
            for layer in PAIR.prefill.kv:
                layer[30] = -1  # the scheduler gave the page to another request
            PAIR.prefill.aux[3] = -1
            assert receiver.poll() not in DONE + LOST, "decode is not told before it is over"
    finally:
        manager.transfer_s = allowed
    until(lambda: not rooms.numbers(), "settled")
    until(lambda: receiver.poll() in DONE + LOST, "notice")
    for layer, was in zip(PAIR.prefill.kv, kept, strict=True):
        layer[30] = was
    assert receiver.poll() == KVPoll.Failed, "decode took a room that prefill had given up"
    assert "SGLANG_DISAGGREGATION_TRANSFER_TIMEOUT" in reason(receiver)


def given_up_by_a_stock_peer() -> None:
    """As above: without our frame decode is not told anything, least of all that it is done."""
    sender, receiver = PAIR.room()
    receiver.send_metadata(pages(1), 0, None)
    PAIR.announced(sender)
    sender.init(1, 3)
    manager = PAIR.prefill.manager
    allowed, manager.transfer_s = manager.transfer_s, 0.2
    rooms = manager.rooms
    try:
        with agent_that(check_xfer_state=lambda handle: "PROC"):
            sender.send(pages(30))
            until(lambda: sender.poll() == KVPoll.Failed, "deadline")
            assert reason(sender)
    finally:
        manager.transfer_s = allowed
    until(lambda: not rooms.numbers(), "settled")
    until(lambda: PAIR.arrived([30], [1]), "it has landed")
    with counted("send_notif") as calls:
        PAIR.wipe()
        partial_delta()  # a room after it, whose note would have overtaken nothing
    assert receiver.poll() not in DONE, "decode took a room that prefill had given up"
    assert calls == {"send_notif": 1}
    receiver.clear()


def decode_is_gone() -> None:
    """The transport says so of one transfer; nobody knows what it has sent of it."""
    sender, receiver = PAIR.room()
    receiver.announce(pages(4, 5), 5, prefix_len=0)
    PAIR.announced(sender)
    sender.init(2, 3)
    rooms = PAIR.prefill.manager.rooms
    with doubt_of(1.0), agent_that(check_xfer_state=raises):
        sender.send(pages(30, 31))
        until(lambda: sender.poll() == KVPoll.Failed, "failure")
        text = reason(sender)
        assert "to decode was broken off by the transport: ZeroDivisionError" in text, text
        assert rooms.numbers() and receiver.poll() not in DONE + LOST, "it is not told at once"
    until(lambda: receiver.poll() in DONE + LOST, "notice")
    assert "broken off" in reason(receiver) and not rooms.numbers()


def one_transfer_a_room() -> None:
    """Decode takes the metadata in the note; one of an older version, or with other sizes, not."""
    with counted("transfer", "send_notif") as calls:
        partial_delta()
    assert calls == {"transfer": 2, "send_notif": 1}, calls  # of two chunks
    PAIR.wipe()
    with counted("transfer", "send_notif") as calls:
        full_hit()
    assert calls == {"send_notif": 1}, calls
    PAIR.wipe()
    decode = PAIR.decode.manager
    decode.expect_metadata = lambda room, slot: False  # as a package that knew nothing of this
    try:
        with counted("transfer", "send_notif") as calls:
            partial_delta()
        assert calls == {"transfer": 3, "send_notif": 2}, calls
        PAIR.wipe()
        full_hit()
    finally:
        del decode.expect_metadata


def metadata_of_other_sizes() -> None:
    sender, receiver = PAIR.room()
    receiver.announce(pages(4), 5, prefix_len=0)
    PAIR.announced(sender)
    sender.init(1, 3)
    layout = PAIR.prefill.manager.transfers.backend._layout
    layout.metadata_bytes = lambda slot: [b"123"]
    try:
        sender.send(pages(30))
        until(lambda: receiver.poll() == KVPoll.Failed, "refusal")
    finally:
        del layout.metadata_bytes
    text = reason(receiver)
    assert "metadata of [3] bytes" in text and "has [64]" in text, text
    assert PAIR.decode.aux.abs().sum() == 0
    until(lambda: sender.poll() in DONE + LOST, "sender")
    sender.clear()


def source_is_kept_until_it_was_read() -> None:
    """Everything waits in the queue: NIXL has been told nothing yet."""
    sender, receiver = PAIR.room()
    receiver.announce(pages(4), 5, prefix_len=0)
    PAIR.announced(sender)
    sender.init(1, 3)
    posting, go_on = threading.Event(), threading.Event()
    agent = PAIR.prefill.manager.agent
    transfer = type(agent).transfer

    def held_up(handle, note=b""):
        posting.set()
        go_on.wait(LIMIT_S)
        return transfer(agent, handle, note)

    table = pages(30)
    with agent_that(transfer=held_up):
        sender.send(table)
        assert posting.wait(LIMIT_S)
        table[0] = 31  # the scheduler's table changes; the chunk in the queue does not
        sender.abort()
        assert {sender.poll() for _ in range(3)} == {KVPoll.Transferring}, "its page is still read"
        go_on.set()
        until(lambda: sender.poll() == KVPoll.Failed, "settled")
    assert PAIR.arrived([30], [4])
    assert reason(sender)
    # Everything was on its way when it was aborted: decode may see that before the notice.
    until(lambda: receiver.poll() in (KVPoll.Failed, KVPoll.Success), "notice")
    receiver.clear()


def many_rooms_drain_once() -> None:
    """Twenty receivers, polled turn by turn."""
    rooms = [PAIR.room() for _ in range(20)]
    for slot, (sender, receiver) in enumerate(rooms):
        receiver.announce(pages(slot), slot % 8, prefix_len=0)
        PAIR.announced(sender)
    agent, drains = PAIR.decode.manager.agent, []
    drain = type(agent).get_new_notifs
    agent.get_new_notifs = lambda: drains.append(1) or drain(agent)
    try:
        for _ in range(5):
            for _, receiver in rooms:
                receiver.poll()
    finally:
        del agent.get_new_notifs
    assert len(drains) == 5, drains
    for sender, _ in rooms:
        sender.init(1, 0)
        sender.send(pages(40))
    for sender, receiver in rooms:
        assert PAIR.finish(sender, receiver) == DONE
        sender.clear()
        receiver.clear()


def decode_rank_was_forgotten() -> None:
    manager = PAIR.prefill.manager
    info = manager.decode_kv_args_table["decode"]
    sender, receiver = PAIR.room()
    receiver.announce(pages(4), 5, prefix_len=0)
    PAIR.announced(sender)
    sender.init(1, 3)
    manager.peers.forget("decode")
    sender.send(pages(30))
    until(lambda: sender.poll() == KVPoll.Failed, "failure")
    assert "decode rank decode is not registered here any more" in reason(sender)
    until(lambda: receiver.poll() == KVPoll.Failed, "notice")
    assert reason(receiver)
    manager.peers.add(info)  # it registers again
    assert manager.decode_kv_args_table["decode"] is info
    PAIR.wipe()
    partial_delta()


def announced_after_the_failure() -> None:
    sender, receiver = PAIR.room()
    sender.abort()
    assert sender.poll() == KVPoll.Failed and reason(sender)
    receiver.announce(pages(4), 5, prefix_len=0)
    until(lambda: receiver.poll() == KVPoll.Failed, "notice")
    assert receiver.defer_free() is None
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
    withdrawn_while_written,
    withdrawn_when_all_was_sent,
    withdrawn_before_the_request_came,
    given_up_and_refused,
    room_number_still_in_use,
    prefill_rank_is_a_new_one,
    prefill_is_gone,
    transfer_that_never_settles,
    decode_is_gone,
    given_up_by_a_stock_peer,
    one_transfer_a_room,
    metadata_of_other_sizes,
    announced_after_the_failure,
    never_announced,
    no_prepared_lists,
    source_is_kept_until_it_was_read,
    many_rooms_drain_once,
    decode_rank_was_forgotten,
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
