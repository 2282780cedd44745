"""A steady load: the requests that are sent, and those that are counted."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from typing import cast

import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st

from benchmark.agentic.fleet.spec import Rig, load
from benchmark.agentic.load.outcome import Classes
from benchmark.agentic.load.prepare import Bodies
from benchmark.agentic.load.run import Clock, Counting, Window
from benchmark.agentic.load.sessions import (
    COLD,
    FIRST,
    LATER,
    Made,
    Turn,
    begun,
    by_session,
    made_sessions,
    trace_sessions,
    turns,
)
from benchmark.agentic.studies.spec import Study, find
from benchmark.traces.record import Record

WORDS = range(16, 5000)


def played(made: Made, sessions: int, at_once: int = 0) -> list[list[tuple[object, list[int]]]]:
    """Play sessions whose every answer is the turn's number, three times."""
    played_sessions = []
    source = made_sessions(made, WORDS, at_once)
    for _ in range(sessions):
        (_, session), sent = next(source), []
        with suppress(StopIteration):
            turn, request = next(session)
            while True:
                sent.append((turn, list(request.prompt)))
                turn, request = session.send([turn.turn or 0] * 3)
        played_sessions.append(sent)
    return played_sessions


def test_a_turn_has_the_history_with_its_answers() -> None:
    """Guards against sessions whose answers a cache on decode could not hold, and against prompts
    that differ between arms or share unintended tokens."""
    made = Made(first_tokens=20, turns=3, turn_tokens=5, prefixes=2, prefix_tokens=7)
    sessions = played(made, 4)
    assert sessions == played(made, 4)
    for number, sent in enumerate(sessions):
        assert [turn.kind for turn, _ in sent] == [FIRST, LATER, LATER]
        assert [turn.index for turn, _ in sent] == [3 * number, 3 * number + 1, 3 * number + 2]
        (_, first), (_, second), (_, third) = sent
        assert second[:27] == first and second[27:30] == [0] * 3 and len(second) == 35
        assert third[:35] == second and third[35:38] == [1] * 3
        assert all(turn.prompt_tokens == len(prompt) for turn, prompt in sent)
    starts = [turns[0][1] for turns in sessions]
    assert starts[0][:7] == starts[2][:7] != starts[1][:7] == starts[3][:7]
    assert starts[0][7:] != starts[2][7:]
    assert made.largest == 27 + 2 * 5 + 3 * made.answer_tokens


def test_the_first_sessions_start_half_way() -> None:
    """Guards a load that is steady from the start: if all sessions began with their first turn, 24
    concurrent sessions would count different turns than one session. Sizes are those of the whole
    session."""
    sizes = {"first_tokens": 20, "turns": 6, "turn_tokens": 5, "answer_tokens": 3}
    made = Made(**sizes, prefixes=1, prefix_tokens=7)
    for partial_turns, all_turns in zip(played(made, 14, 12), played(made, 14), strict=True):
        partial, whole = (
            [(x.index, x.turn, x.prompt_tokens) for x, _ in turns]
            for turns in (partial_turns, all_turns)
        )
        assert partial == whole[-len(partial) :]
    assert {len(turns) for turns in played(made, 14, 12)} == set(range(1, 7))
    began = played(Made(**sizes, cold_share=0.25, cold_tokens=2), 900, 900)
    assert sum(turns[0][0].kind == COLD for turns in began) / 900 == pytest.approx(0.25, abs=0.03)


def test_a_trace_begins_with_sessions_by_their_requests() -> None:
    """Guards against a load that begins with short sessions: a fifth of these sessions hold three
    fifths of the turns. No session comes twice, and requests of later rounds keep their place."""
    trace = [
        [
            Turn(0, f"{n}", i, 1, 1, 1, "")
            for i in range(8 if n % 10 == 8 else 4 if n % 10 == 9 else 1)
        ]
        for n in range(200)
    ]
    found = begun(trace, 100, 20)
    assert sum(len(trace[int(session[0].session_id or 0)]) > 1 for session in found[:20]) >= 8
    assert found[-100:] == trace[100:] and len(found) == len(trace)


def test_new_tokens_of_a_load_are_counted_in_its_order() -> None:
    """Guards the count of tokens that servers have to compute: sessions of a trace are sent in
    another order than in the trace, a partial block is no hit, and the last token is always
    computed."""

    class Nothing:
        block_tokens = 16

        def submit(self, record: Record | None) -> None:
            return None

    sizes = {(1, 2, 3): 48, (1, 2): 30, (1, 9): 32}
    records = [Record(0.0, tokens, 1, ids) for ids, tokens in sizes.items()]
    for order, expected in (((0, 0, 1, 2), [48, 16, 14, 16]), ((1, 2, 0), [30, 16, 16])):
        firsts = [next(turns([records[index]], 16, Classes())) for index in order]
        sent = trace_sessions([[turn] for turn in firsts], cast(Bodies, Nothing()))
        new_tokens = [turn.load_new_tokens for _, session in sent for turn, _ in session]
        assert new_tokens == expected


def test_an_answer_is_no_new_token_of_the_next_turn() -> None:
    """Guards the figure that judges decode's writes: a server holds an answer except its last
    token, and a prefix of an earlier session, in whole pages."""
    made = Made(first_tokens=20, turns=2, turn_tokens=10, prefixes=1, prefix_tokens=17)
    sessions = made_sessions(made, WORDS, block_tokens=16)
    new_tokens = []
    for _ in range(2):
        _, session = next(sessions)
        turn, request = next(session)
        new_tokens.append(turn.load_new_tokens)
        turn, _ = session.send([5] * 12)
        new_tokens.append(turn.load_new_tokens)
        assert len(request.prompt) == 37 and turn.prompt_tokens == 37 + 12 + 10
    assert new_tokens == [37, 59 - 48, 37 - 16, 59 - 48]
    _, session = next(made_sessions(Made(first_tokens=20, turns=2, turn_tokens=12), WORDS, 0, 16))
    next(session)
    assert session.send([5] * 12)[0].load_new_tokens == 44 - 16, "31 of 32 tokens are computed"


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5])
def test_a_share_of_the_requests_is_cold(share: float) -> None:
    made = Made(first_tokens=4, turns=4, turn_tokens=2, cold_tokens=9, cold_share=share)
    kinds = Counter(turn.kind for turns in played(made, 2000) for turn, _ in turns)
    assert kinds[COLD] / kinds.total() == pytest.approx(share, abs=0.03)
    assert made.classes == [FIRST, LATER] + [COLD] * (share > 0)
    with pytest.raises(ValueError, match="cold_share"):
        Made(cold_share=1.0)


@given(st.lists(st.sampled_from([FIRST, LATER]), min_size=60, max_size=200), st.integers(1, 8))
def test_counted_requests_begin_in_the_window_and_are_awaited(
    kinds: list[str], concurrency: int
) -> None:
    """Guards against counting the start or the end, or only requests short enough to end in
    time."""
    window = Window(warm_up=5, requests=20, of_class=6, limit_s=1e9)
    load = Counting(window, [FIRST, LATER], concurrency)
    in_flight: list[bool] = []
    counted, ended = Counter[str](), 0
    for now, kind in enumerate(kinds):
        if load.over:
            break
        counts = load.begins(kind, float(now))
        assert not (counts and ended < max(5, 2 * concurrency)), "the warm-up counts, or the burst"
        assert not (counts and load.closed), "the end counts"
        counted[kind] += counts
        in_flight.append(counts)
        if len(in_flight) >= concurrency:
            load.ended(in_flight.pop(0))
            ended += 1
    if load.closed:
        assert counted.total() >= 20 and min(counted[FIRST], counted[LATER]) >= 6
        assert load.over == (not any(in_flight))
    else:
        assert counted.total() < 20 or min(counted[FIRST], counted[LATER]) < 6


def test_a_window_closes_in_the_end() -> None:
    """Guards the length of a study: no load is longer than its limit, even if its window never
    opened."""
    load = Counting(Window(warm_up=0, requests=1000, limit_s=10), [FIRST, COLD])
    assert load.begins(FIRST, 1.0) and load.begins(FIRST, 9.0)
    assert not load.begins(FIRST, 12.0) and load.closed == 12.0 and not load.over
    load.ended(True)
    load.ended(True)
    assert load.over and load.span(20.0) == (1.0, 12.0)
    load = Counting(Window(warm_up=9, limit_s=10), [])
    assert not load.begins(FIRST, 1.0) and not load.begins(FIRST, 12.0) and load.over
    assert load.span(20.0) == (12.0, 12.0), "the warm-up is no window"
    load = Counting(None, [])
    assert load.begins(FIRST, 1e9) and not load.over, "a whole trace counts"


@pytest.mark.parametrize("name", ["worth", "break_even", "throughput"])
def test_studies_take_an_hour_and_count_enough(name: str) -> None:
    """Guards the promise of the pages: at least three loads of 200 requests within an hour."""
    study = load(find(name), Study)
    window = study.load.window
    loads = study.rounds * len(study.arms) * len(study.points)
    assert window is not None and loads * study.load_s(Rig().start_s) <= 3600
    assert study.rounds * window.requests >= 200 and study.rounds * window.of_class >= 30
    assert len(study.points) >= (27 if name == "break_even" else 5)


def test_sessions_of_a_trace_keep_their_turns_and_times() -> None:
    """Guards against a conversation taken apart, even if the trace has blocks only, and against a
    pause as long as the start time of a cut-out trace."""
    records = [
        Record(1000, 4, 1, (1,), session_id="a", turn=0),
        Record(2000, 4, 1, (2,), session_id="b", turn=0),
        Record(3000, 8, 1, (1, 3), session_id="a", turn=1),
        Record(7000, 8, 1, (2, 4), session_id="b", turn=1),
        Record(9000, 12, 1, (1, 3, 5), session_id="a", turn=2),
        Record(9500, 12, 1, (1, 9, 5), session_id="c", turn=0),
    ]
    sessions = by_session(turns(records, 4, Classes(5, 5)))
    assert [[turn.index for turn in session] for session in sessions] == [[0, 2, 4], [1, 3], [5]]
    assert [turn.at_s for turn in sessions[0]] == [0, 2, 8] and sessions[0][1].new_tokens == 4
    assert sessions[2][0].new_tokens == 8, "nothing behind a miss is a hit"
    bare = [Record(r.timestamp, r.input_length, 1, r.hash_ids) for r in records[:5]]
    again = by_session(turns(bare, 4, Classes(5, 5)))
    assert [[turn.index for turn in session] for session in again] == [[0, 2, 4], [1, 3]]


def test_a_loop_that_counts_milliseconds() -> None:
    """Guards against a turn that is sent early: uvloop rounds a sleep to whole milliseconds."""

    async def early_by_s() -> float:
        clock = Clock()
        await clock.until(0.00248)
        return 0.00248 - clock.now()

    assert max(uvloop.run(early_by_s()) for _ in range(10)) <= 0
