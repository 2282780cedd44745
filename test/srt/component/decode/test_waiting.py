"""A request that waits for memory: one log line, and a deadline."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from component.decode.decoder import Decoder
from component.decode.peer import Room, Unasked
from component.decode.steps import admit, finish, ids, retract, run, tick
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.delta.decode import admission

TIMEOUT = "SGLANG_DISAGGREGATION_DECODE_ADMISSION_TIMEOUT"


@pytest.fixture
def full(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> Decoder:
    """A server with a pool that one transfer fills, at second 0; a parameter is its settings."""
    caplog.set_level(logging.WARNING)
    for name, value in getattr(request, "param", {}).items():
        monkeypatch.setenv(name, value)
    decoder = Decoder(16, 640)
    admit(decoder, ids(1, 600))
    assert len(decoder.in_transfer) == 1
    return decoder


def at(decoder: Decoder, now: float) -> None:
    """Run a step at second ``now``."""
    decoder.now = now
    tick(decoder)


def waits(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the log lines about waiting requests."""
    return [line for line in caplog.messages if "for decode memory" in line]


def test_the_deadline_is_told_in_words(full: Decoder) -> None:
    """Guards against a client that waits for ever, and against an error that does not name the
    exceeded setting, the request and its room, and the missing memory. An admitted request has no
    deadline."""
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


@pytest.mark.parametrize("full", [{TIMEOUT: "5"}], indirect=True)
def test_the_deadline_counts_from_the_handshake(full: Decoder) -> None:
    """Guards against a slow prefill server that uses up the time, and a setting without effect."""
    (req,) = admit(full, ids(2, 200), new=4, ready=False)
    at(full, 200.0)
    full.room(req).state = KVPoll.WaitingForInput
    for second, queued in ((250.0, [req]), (254.9, [req]), (255.0, [])):
        at(full, second)
        assert full.queued == queued
    assert "allows 5 s" in full.mailbox.reasons[req.rid]["message"]
    finish(full)


def test_a_long_wait_is_logged_once(full: Decoder, caplog: pytest.LogCaptureFixture) -> None:
    """Guards against a full server without a sign in its log, and against a line for every step.
    The line names the needed tokens and the use of the pool, including the part that a dead peer's
    transfer holds."""
    full.abort(full.in_transfer[0].rid)
    (req,) = admit(full, ids(2, 200), new=4)
    at(full, 9.9)
    assert waits(caplog) == []
    for second in (10, 11, 60):
        at(full, second)
    assert waits(caplog) == [
        f"request {req.rid} (bootstrap_room={req.bootstrap_room}) has waited 10 s for "
        "decode memory: not enough free KV tokens; it needs 208 tokens, 32 free, 0 evictable, "
        "0 protected, 0 reserved, 608 in deferred release"
    ]


def test_retracted_requests_say_that_they_wait(caplog: pytest.LogCaptureFixture) -> None:
    """Guards against a client whose answer stalls without a trace in the log, and against a second
    retraction that counts as the first one's wait."""
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


@pytest.mark.parametrize("paused", [False, True])
def test_handshakes_end_while_a_retracted_request_waits(paused: bool) -> None:
    """Guards against clients that get no answer for as long as a retracted request waits, after the
    loss of their prefill server or their disconnect. No request is admitted before it."""
    decoder = Decoder(16, 640)
    run(decoder, ids(1, 100), ids(2, 100), steps=3)
    first = retract(decoder)
    rows = decoder.req_to_token_pool
    taken, rows.free_slots, decoder._engine_paused = rows.free_slots, [], paused
    lost, left, gone, waits = (decoder.submit(ids(n, 50), ready=n > 4) for n in (3, 4, 5, 6))
    decoder.room(lost).state = KVPoll.Failed
    decoder.abort(left.rid)
    decoder.tick_queues()
    assert [decoder.mailbox.ends[req.rid] for req in (lost, left, gone, waits)] == [1, 1, 0, 0]
    decoder.room(gone).state = KVPoll.Failed
    decoder.tick_queues()
    assert decoder.mailbox.ends[gone.rid] == 1
    rows.free_slots = taken
    tick(decoder)
    assert (decoder.retracted == [first]) == paused
    assert (decoder.queued == [waits]) == paused
    decoder._engine_paused = False
    finish(decoder)


# ---- a long queue ----

LONG_LINE = 1000
STEPS = -(-LONG_LINE // admission.MAX_CHECKED)


def polls_of_a_step(decoder: Decoder) -> int:
    """Return the number of receivers that the next step polls."""
    polled: list[Room] = []
    with pytest.MonkeyPatch.context() as patch:
        poll = Room.poll
        patch.setattr(Room, "poll", lambda room: polled.append(room) or poll(room))
        decoder.tick_queues()
    return len(polled)


@pytest.mark.hazard("step-per-waiting-request")
def test_a_step_polls_a_part_of_many_handshakes() -> None:
    """Guards against a silent prefill server with 10,000 requests for it that costs every step a
    pass over all of them; a request for another server does not wait for those."""
    decoder, asked = Decoder(16, 640), list[str]()
    servers: Any = Unasked()
    servers.connections.ensure = lambda address: bool(asked.append(address))
    decoder.kv_manager.servers = servers
    reqs = [decoder.submit([3], ready=False, pending=True) for _ in range(LONG_LINE)]
    tick(decoder)
    asked.clear()
    assert all(polls_of_a_step(decoder) < 300 for _ in range(STEPS))
    assert len(asked) <= 1
    other = decoder.submit([5] * 40)
    tick(decoder)
    assert decoder.in_transfer == [other]
    gone = reqs[::97]
    for req in gone:
        decoder.abort(req.rid)
    tick(decoder, STEPS)
    assert all(decoder.mailbox.ends[req.rid] == 1 for req in gone)
    assert len(decoder.queued) == LONG_LINE - len(gone)


class Rid(str):
    """Counts the comparisons of this id with the id of an abort."""

    compared = 0

    def startswith(self, *prefix: Any) -> bool:
        Rid.compared += 1
        return super().startswith(*prefix)


@pytest.mark.parametrize("options", [{}, {"local": 60, "lost": 60}], ids=["", "local turns"])
def test_an_abort_goes_through_a_long_line_once(options: dict[str, int]) -> None:
    """Guards against an abort that costs milliseconds more than SGLang's own search of its queues:
    with 10,000 queued requests every client that leaves would stall running ones."""
    decoder = Decoder(16, 640, **options)
    reqs = [decoder.submit(ids(2 + number, 600), new=4) for number in range(LONG_LINE)]
    tick(decoder)
    for req in reqs:
        req.rid = Rid(req.rid)
    Rid.compared = 0
    decoder.abort(reqs[500].rid)
    assert 0 < Rid.compared <= LONG_LINE
    tick(decoder, STEPS)
    assert decoder.mailbox.ends[reqs[500].rid] == 1


@pytest.mark.hazard("step-per-waiting-request")
def test_a_step_looks_at_a_part_of_a_long_line(
    full: Decoder, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards against a step whose cost, or number of log lines, grows with the number of waiting
    requests; and against a request that is never checked: failed and expired requests are answered
    within one pass of the queue."""
    reqs = [full.submit(ids(2 + number, 200), new=4) for number in range(LONG_LINE)]
    tick(full, STEPS)
    full.now = 10.0
    assert all(polls_of_a_step(full) < 300 for _ in range(2 * STEPS))
    found = waits(caplog)
    assert len(found) < 20  # all requests that wait for the same one share a line
    words = [word.strip(",;") for text in found for word in text.split()]
    # Requests behind the head name it, too.
    assert [words.count(req.rid) for req in reqs[1:]] == [1] * (LONG_LINE - 1)
    assert f"request {reqs[0].rid} ahead of it does not fit" in found[1]
    gone = [reqs[place] for place in (0, 1, 127, 128, 500, 999)]
    for req in gone:
        full.room(req).state = KVPoll.Failed
    tick(full, STEPS)
    assert full.queued == [req for req in reqs if req not in gone]
    full.now = 310.0
    assert all(polls_of_a_step(full) < 300 for _ in range(STEPS))
    assert full.queued == []
    finish(full)
