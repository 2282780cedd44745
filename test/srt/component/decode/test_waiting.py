"""A request that waits for memory: it says so once, and not for ever."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from component.decode.decoder import Decoder
from component.decode.peer import Room
from component.decode.steps import admit, finish, ids, retract, run, tick
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.delta.decode import candidates as line

TIMEOUT = "SGLANG_DISAGGREGATION_DECODE_ADMISSION_TIMEOUT"
LOG = "SGLANG_DISAGGREGATION_DECODE_WAIT_LOG"
WAIT_TOKENS = "SGLANG_DISAGGREGATION_DECODE_PREFIX_WAIT_TOKENS"


@pytest.fixture
def full(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> Decoder:
    """A server whose pool one transfer fills, at second 0; a parameter is its settings."""
    caplog.set_level(logging.WARNING)
    for name, value in getattr(request, "param", {}).items():
        monkeypatch.setenv(name, value)
    decoder = Decoder(16, 640)
    admit(decoder, ids(1, 600))
    assert len(decoder.in_transfer) == 1
    return decoder


def at(decoder: Decoder, now: float) -> None:
    """A step at this second."""
    decoder.now = now
    tick(decoder)


def waits(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The lines that say that somebody waits."""
    return [line for line in caplog.messages if "for decode memory" in line]


def test_the_deadline_is_told_in_words(full: Decoder) -> None:
    """Guards against a client that waits for ever, and against an error that does not say which
    setting it met, which request and room it was about, and what was missing. Who was admitted has
    no deadline."""
    (filler,) = full.in_transfer
    head, behind = admit(full, ids(2, 200), ids(3, 300), new=4)
    at(full, 299.9)
    assert full.queued == [head, behind]
    at(full, 300.0)
    assert full.queued == [] and full.in_transfer == [filler]
    for req, room in ((head, full.rooms[1]), (behind, full.rooms[2])):
        reason = full.mailbox.reasons[req.rid]
        message = reason["message"]
        assert reason["status_code"] == 503
        assert all(word in message for word in (TIMEOUT, req.rid, f"={req.bootstrap_room})"))
        assert "32 free, 0 evictable, 0 protected, 0 reserved, 0 in deferred" in message
        assert room.clears == 1 and room.withdrawn == [message]
    told = [full.mailbox.reasons[req.rid]["message"] for req in (head, behind)]
    assert "not enough free KV tokens; it needs 208 tokens" in told[0]
    assert f"request {head.rid} ahead of it does not fit" in told[1]
    finish(full)


@pytest.mark.parametrize(("full", "seconds"), [({}, 300), ({TIMEOUT: "5"}, 5)], indirect=["full"])
def test_the_deadline_counts_from_the_handshake(full: Decoder, seconds: int) -> None:
    """Guards against a slow prefill server that uses up the time for memory, and against a setting
    that nobody reads."""
    (req,) = admit(full, ids(2, 200), new=4, ready=False)
    at(full, 200.0)
    full.room(req).state = KVPoll.WaitingForInput
    at(full, 250.0)
    at(full, 249.0 + seconds)
    assert full.queued == [req]
    at(full, 250.0 + seconds)
    assert full.queued == []
    assert f"allows {seconds} s" in full.mailbox.reasons[req.rid]["message"]
    finish(full)


@pytest.mark.parametrize(("full", "seconds"), [({}, 10), ({LOG: "2"}, 2)], indirect=["full"])
def test_a_long_wait_is_logged_once(
    full: Decoder, seconds: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards against a server that gives no sign of being full, and against a line for every step;
    the line says what is wanted and where the pool's tokens are, those that a dead peer's transfer
    holds too. Guards against a setting that nobody reads."""
    full.abort(full.in_transfer[0].rid)
    (req,) = admit(full, ids(2, 200), new=4)
    at(full, seconds - 0.1)
    assert waits(caplog) == []
    for second in (seconds, seconds + 1, 60):
        at(full, second)
    assert waits(caplog) == [
        f"request {req.rid} (bootstrap_room={req.bootstrap_room}) has waited {seconds} s for "
        "decode memory: not enough free KV tokens; it needs 208 tokens, 32 free, 0 evictable, "
        "0 protected, 0 reserved, 608 in deferred release"
    ]


def test_retracted_requests_say_that_they_wait(caplog: pytest.LogCaptureFixture) -> None:
    """Guards against a client whose answer stands still without a trace in the log; and against a
    second retraction that counts as the first one's wait."""
    decoder = Decoder(16, 640)
    run(decoder, ids(1, 100), ids(2, 100), steps=3)
    rows = decoder.req_to_token_pool
    for round_number, second in enumerate((0.0, 1000.0)):
        decoder.now = second
        retract(decoder)
        taken, rows.free_slots = rows.free_slots, []
        for wait in (0.0, 9.9, 10.0, 11.0):
            decoder.now = second + wait
            decoder.tick_queues()
        assert len(waits(caplog)) == round_number + 1
        assert "after it was retracted: no free request row" in waits(caplog)[-1]
        rows.free_slots = taken
        tick(decoder)
        decoder.tick_batch()
        assert decoder.retracted == []
    finish(decoder)


# ---- refusals are counted ----


def test_refusals_are_counted_once(full: Decoder) -> None:
    """Guards against a counter that counts steps: each reason counts once a request."""
    refusals = full.decode_metrics.refusals
    admit(full, ids(2, 200), new=4)
    tick(full, 5)
    assert refusals == {"no_tokens": 1}
    for name, pool in (
        ("no_request_row", full.req_to_token_pool),
        ("no_metadata_slot", full.req_to_metadata_buffer_idx_allocator),
    ):
        taken, pool.free_slots = pool.free_slots, type(pool.free_slots)()
        for _ in range(5):
            full.tick_queues()
        pool.free_slots = taken
        assert refusals[name] == 1
    finish(full)


def test_a_follower_is_not_matched_while_it_waits(
    monkeypatch: pytest.MonkeyPatch, matches: list[int]
) -> None:
    """Guards against matching a whole burst on every step, against a burst that keeps others from
    their turn (eight in line are tried, and who waits is found without a match), and against
    waiting that nobody sees, because it is no lack of memory."""
    monkeypatch.setenv(WAIT_TOKENS, "64")
    decoder = Decoder(16, 640)
    followers = [decoder.submit([*ids(1, 160), number], new=4) for number in range(12)]
    other = decoder.submit(ids(5, 20), new=4)
    tick(decoder, 10)
    assert decoder.in_transfer == [followers[0], other]
    assert len(matches) == 2  # those that got in
    assert decoder.decode_metrics.refusals == {"prefix_arriving": 11}
    finish(decoder)


# ---- a long line ----

LONG_LINE = 1000
STEPS = -(-LONG_LINE // line.CHECKED)


def long_line(decoder: Decoder) -> list[Any]:
    """So many requests in line that no step looks at all of them."""
    return [decoder.submit(ids(2 + number, 200), new=4) for number in range(LONG_LINE)]


def polls_of_a_step(decoder: Decoder) -> int:
    """How many receivers the next step polls."""
    polled: list[Room] = []
    with pytest.MonkeyPatch.context() as patch:
        poll = Room.poll
        patch.setattr(Room, "poll", lambda room: polled.append(room) or poll(room))
        decoder.tick_queues()
    return len(polled)


@pytest.mark.hazard("step-per-waiting-request")
def test_a_step_looks_at_a_part_of_a_long_line(full: Decoder) -> None:
    """Guards against a step that costs the more the more requests wait; and against one that
    nobody looks at: who fails or has waited too long is answered within a turn of the line."""
    reqs = long_line(full)
    tick(full)
    assert all(polls_of_a_step(full) < 300 for _ in range(STEPS))
    gone = [reqs[place] for place in (0, 1, 127, 128, 500, 999)]
    for req in gone:
        full.room(req).state = KVPoll.Failed
    tick(full, STEPS)
    assert full.queued == [req for req in reqs if req not in gone]
    full.now = 300.0
    assert all(polls_of_a_step(full) < 300 for _ in range(STEPS))
    assert full.queued == []
    finish(full)


@pytest.mark.hazard("step-per-waiting-request")
def test_a_long_line_is_logged_in_few_lines(
    full: Decoder, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards against seconds of log lines in one step: all who wait for the same are one."""
    reqs = long_line(full)
    tick(full)
    full.now = 10.0
    tick(full, 2 * STEPS)
    found = waits(caplog)
    assert len(found) < 20
    words = [word.strip(",;") for text in found for word in text.split()]
    # The head is named by those behind it, too.
    assert [words.count(req.rid) for req in reqs[1:]] == [1] * (LONG_LINE - 1)
    assert f"request {reqs[0].rid} (bootstrap_room={reqs[0].bootstrap_room}) has" in found[0]
    assert f"request {reqs[0].rid} ahead of it does not fit" in found[1]
