"""A request that waits for memory: it says so once, and not for ever."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from component.decode.checks import check, check_idle
from component.decode.decoder import Decoder
from component.decode.peer import Room
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.delta.decode import candidates as line

TIMEOUT = "SGLANG_DISAGGREGATION_DECODE_ADMISSION_TIMEOUT"
LOG = "SGLANG_DISAGGREGATION_DECODE_WAIT_LOG"
WAIT_TOKENS = "SGLANG_DISAGGREGATION_DECODE_PREFIX_WAIT_TOKENS"


def ids(start: int, count: int) -> list[int]:
    """A text of its own for each ``start``."""
    return [(start * 7 + number * (start + 1)) % 50 for number in range(count)]


class Scene:
    """A decode server whose clock the test moves."""

    def __init__(self) -> None:
        self.now = 0.0
        self.decoder = Decoder(16, 640)
        self.decoder.disagg_decode_prealloc_queue.clock = lambda: self.now

    def tick(self, at: float | None = None) -> None:
        if at is not None:
            self.now = at
        self.decoder.tick_queues()
        check(self.decoder)

    def submit(self, *arguments: Any, **options: Any) -> Any:
        req = self.decoder.submit(*arguments, **options)
        self.tick()
        return req

    def reason(self, req: Any) -> dict[str, Any]:
        found: dict[str, Any] = self.decoder.mailbox.reasons[req.rid]
        return found


@pytest.fixture
def scene(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Scene:
    """A server whose pool one transfer fills; a parameter is the settings that it starts with."""
    monkeypatch.setenv(WAIT_TOKENS, "0")
    for name, value in getattr(request, "param", {}).items():
        monkeypatch.setenv(name, value)
    scene = Scene()
    scene.submit(ids(1, 600), new=1)
    assert len(scene.decoder.in_transfer) == 1
    return scene


def room(scene: Scene, req: Any) -> Room:
    """The receiver of a request, also after the request left."""
    number: int = req.bootstrap_room - 1000
    return scene.decoder.rooms[number]


def test_the_deadline_is_told_in_words(scene: Scene) -> None:
    """Guards against a client that waits for ever, and against an error that does not say which
    setting it met, which request and room it was about, and what was missing."""
    head, behind = scene.submit(ids(2, 200), new=4), scene.submit(ids(3, 300), new=4)
    scene.tick(299.9)
    assert scene.decoder.queued == [head, behind]
    scene.tick(300.0)
    assert scene.decoder.queued == []
    for req in (head, behind):
        message = scene.reason(req)["message"]
        assert scene.reason(req)["status_code"] == 503
        assert all(word in message for word in (TIMEOUT, req.rid, f"={req.bootstrap_room})"))
        assert "32 free, 0 evictable, 0 protected, 0 reserved, 0 in deferred" in message
        assert room(scene, req).clears == 1 and room(scene, req).withdrawn == [message]
        assert scene.decoder.mailbox.ends[req.rid] == 1
    assert "not enough free KV tokens; it needs 208 tokens" in scene.reason(head)["message"]
    assert f"request {head.rid} ahead of it does not fit" in scene.reason(behind)["message"]
    scene.decoder.drain()
    check_idle(scene.decoder)


def test_the_deadline_counts_from_the_handshake(scene: Scene) -> None:
    """Guards against a slow prefill server that uses up the time for memory."""
    req = scene.submit(ids(2, 200), new=4, ready=False)
    scene.tick(200.0)
    room(scene, req).state = KVPoll.WaitingForInput
    scene.tick(250.0)
    scene.tick(549.0)
    assert scene.decoder.queued == [req]
    scene.tick(550.0)
    assert scene.decoder.queued == []


@pytest.mark.parametrize("scene", [{TIMEOUT: "5"}], indirect=True)
def test_a_deadline_of_ones_own(scene: Scene) -> None:
    """Guards against a setting that nobody reads."""
    req = scene.submit(ids(2, 200), new=4)
    scene.tick(5.0)
    assert "allows 5 s" in scene.reason(req)["message"]


def test_who_gets_in_has_no_deadline(scene: Scene) -> None:
    """Guards against an error for a request whose transfer takes long after it was admitted."""
    (filler,) = scene.decoder.in_transfer
    scene.tick(1000.0)
    assert scene.decoder.in_transfer == [filler]
    scene.decoder.drain()
    check_idle(scene.decoder)


def waits(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The lines that say that somebody waits."""
    return [line for line in caplog.messages if "for decode memory" in line]


def test_a_long_wait_is_logged_once(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    """Guards against a server that gives no sign of being full, and against a line for every step;
    the line says what is wanted and where the pool's tokens are."""
    with caplog.at_level(logging.WARNING):
        req = scene.submit(ids(2, 200), new=4)
        scene.tick(9.9)
        assert waits(caplog) == []
        for at in (10.0, 11.0, 60.0):
            scene.tick(at)
    assert waits(caplog) == [
        f"request {req.rid} (bootstrap_room={req.bootstrap_room}) has waited 10 s for decode "
        "memory: not enough free KV tokens; it needs 208 tokens, 32 free, 0 evictable, "
        "0 protected, 0 reserved, 0 in deferred release"
    ]


def test_held_pages_are_in_the_line(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    """Guards against memory that is nowhere to be found because a dead peer's pages hold it."""
    (filler,) = scene.decoder.in_transfer
    scene.decoder.abort(filler.rid)
    req = scene.submit(ids(2, 200), new=4)
    with caplog.at_level(logging.WARNING):
        scene.tick(10.0)
    (line,) = waits(caplog)
    assert req.rid in line and "608 in deferred release" in line


@pytest.mark.parametrize("scene", [{LOG: "2"}], indirect=True)
def test_another_limit(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    """Guards against a setting that nobody reads."""
    scene.submit(ids(2, 200), new=4)
    with caplog.at_level(logging.WARNING):
        scene.tick(2.0)
    assert len(waits(caplog)) == 1


def test_retracted_requests_say_that_they_wait(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards against a client whose answer stands still without a trace in the log; and against a
    second retraction that counts as the first one's wait."""
    monkeypatch.setenv(WAIT_TOKENS, "0")
    scene, texts = Scene(), [ids(1, 100), ids(2, 100)]
    decoder = scene.decoder
    reqs = [scene.submit(text, new=100) for text in texts]
    for req in reqs:
        decoder.deliver(req)
    scene.tick()
    for _ in range(3):
        decoder.tick_batch()
    for round_number, at in enumerate((0.0, 1000.0)):
        scene.now = at
        rows = decoder.req_to_token_pool
        decoder.retract()
        taken, rows.free_slots = rows.free_slots, []
        with caplog.at_level(logging.WARNING):
            for wait in (0.0, 9.9, 10.0, 11.0):
                scene.now = at + wait
                decoder.tick_queues()
        assert len(waits(caplog)) == round_number + 1
        assert "after it was retracted: no free request row" in waits(caplog)[-1]
        rows.free_slots = taken
        scene.tick()
        decoder.tick_batch()
        assert decoder.disagg_decode_prealloc_queue.retracted_queue == []
    decoder.drain()
    check_idle(decoder)


def test_refusals_are_counted_once(scene: Scene) -> None:
    """Guards against a counter that counts steps: each reason counts once a request."""
    decoder, refusals = scene.decoder, scene.decoder.decode_metrics.refusals
    scene.submit(ids(2, 200), new=4)
    for _ in range(5):
        scene.tick()
    assert refusals == {"no_tokens": 1}
    for name, pool in (
        ("no_request_row", decoder.req_to_token_pool),
        ("no_metadata_slot", decoder.req_to_metadata_buffer_idx_allocator),
    ):
        taken, pool.free_slots = pool.free_slots, type(pool.free_slots)()
        for _ in range(5):
            decoder.tick_queues()
        pool.free_slots = taken
        assert refusals[name] == 1
    decoder.drain()
    check_idle(decoder)


def test_who_waits_for_a_prefix_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against waiting that nobody sees, because it is no lack of memory."""
    monkeypatch.setenv(WAIT_TOKENS, "64")
    scene = Scene()
    for number in range(3):
        scene.decoder.submit([*ids(1, 160), number], new=4)
    for _ in range(5):
        scene.tick()
    assert scene.decoder.decode_metrics.refusals == {"prefix_arriving": 2}
    scene.decoder.drain()
    check_idle(scene.decoder)


def test_a_follower_is_not_matched_while_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against matching a whole burst on every step, and against a burst that keeps others
    from their turn: eight in line are tried, and who waits is found without a match."""
    monkeypatch.setenv(WAIT_TOKENS, "64")
    scene = Scene()
    followers = [scene.decoder.submit([*ids(1, 160), number], new=4) for number in range(12)]
    other = scene.decoder.submit(ids(5, 20), new=4)
    matched: list[int] = []
    tree = type(scene.decoder.tree_cache)
    original = tree.match_prefix

    def counted(self: Any, params: Any) -> Any:
        matched.append(len(params.key.token_ids))
        return original(self, params)

    monkeypatch.setattr(tree, "match_prefix", counted)
    for _ in range(10):
        scene.tick()
    assert scene.decoder.in_transfer == [followers[0], other]
    assert len(matched) == 2  # those that got in
    scene.decoder.drain()
    check_idle(scene.decoder)


def test_cannot_finish_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a refusal that looks like a lack of tokens, while tokens are free."""
    monkeypatch.setenv(WAIT_TOKENS, "0")
    scene = Scene()
    for start in (1, 2, 3):
        scene.decoder.submit(ids(start, 180), new=200)
    scene.tick()
    assert "cannot_finish" in scene.decoder.decode_metrics.refusals


LONG_LINE = 1000


def long_line(scene: Scene) -> list[Any]:
    """So many requests in line that no step looks at all of them."""
    return [scene.decoder.submit(ids(2 + number, 200), new=4) for number in range(LONG_LINE)]


def polls_of_a_step(scene: Scene) -> int:
    """How many receivers the next step polls."""
    polled: list[Room] = []
    with pytest.MonkeyPatch.context() as patch:
        poll = Room.poll
        patch.setattr(Room, "poll", lambda room: polled.append(room) or poll(room))
        scene.decoder.tick_queues()
    return len(polled)


@pytest.mark.hazard("step-per-waiting-request")
def test_a_step_looks_at_a_part_of_a_long_line(scene: Scene) -> None:
    """Guards against a step that costs the more the more requests wait; and against one that
    nobody looks at: who fails or has waited too long is answered within a turn of the line."""
    reqs = long_line(scene)
    scene.tick()
    steps = -(-LONG_LINE // line.CHECKED)
    assert all(polls_of_a_step(scene) < 300 for _ in range(steps))
    gone = [reqs[at] for at in (0, 1, 127, 128, 500, 999)]
    for req in gone:
        room(scene, req).state = KVPoll.Failed
    for _ in range(steps):
        scene.tick()
    assert scene.decoder.queued == [req for req in reqs if req not in gone]
    ends = scene.decoder.mailbox.ends
    assert [ends[req.rid] for req in reqs] == [int(req in gone) for req in reqs]
    scene.now = 300.0
    for _ in range(steps):
        assert polls_of_a_step(scene) < 300
    assert scene.decoder.queued == [] and all(ends[req.rid] == 1 for req in reqs)
    scene.decoder.drain()
    check_idle(scene.decoder)


@pytest.mark.hazard("step-per-waiting-request")
def test_a_long_line_is_logged_in_few_lines(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    """Guards against seconds of log lines in one step: all who wait for the same are one."""
    reqs = long_line(scene)
    with caplog.at_level(logging.WARNING):
        scene.tick()
        scene.now = 10.0
        steps = -(-LONG_LINE // line.CHECKED)
        for _ in range(2 * steps):
            scene.tick()
    found = waits(caplog)
    assert len(found) < 20
    words = [word.strip(",;") for text in found for word in text.split()]
    # The head is named by those behind it, too.
    assert [words.count(req.rid) for req in reqs[1:]] == [1] * (LONG_LINE - 1)
    assert f"request {reqs[0].rid} (bootstrap_room={reqs[0].bootstrap_room}) has" in found[0]
    assert f"request {reqs[0].rid} ahead of it does not fit" in found[1]
