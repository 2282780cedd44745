"""Many requests in line: who is fetched first, who gives pages back, and that nobody is in the way
of the others."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from component.buffer_only.cache import PAGE, Cache, prompt
from component.buffer_only.checks import check, check_idle, nodes
from component.buffer_only.test_prefetch import admit_in_line
from sglang.srt.disaggregation.delta import event_log
from sglang.srt.mem_cache.buffer_only.prefetch import State
from sglang.srt.mem_cache.buffer_only.prefetch_states import AGAIN_MS
from sglang.srt.mem_cache.buffer_only.query import THREADS
from sglang.srt.mem_cache.buffer_only.stage import Direction
from sglang.srt.mem_cache.buffer_only.waiting_line import WaitingLine
from sglang.srt.mem_cache.buffer_only.worth import Choice


def stored(prompts: list[list[int]], **changes: object) -> Cache:
    """A cache with an empty tree, and a store that has all of ``prompts``."""
    cache = Cache(**changes)
    for tokens in prompts:
        cache.compute(tokens)
        cache.settle()
    cache.flush()
    cache.store.calls.clear()
    return cache


@pytest.mark.hazard("back-pressure-deadlock")
@pytest.mark.parametrize("stage", [16, 200])
def test_many_requests_with_long_prefixes_on_the_device(stage: int):
    """Thirty with ten pages in the tree and nineteen in the store each, where the device has room
    for two thirds of it: no clock moves, nobody waits for pins, and no hit is lost."""
    anchors = [prompt(number, 10) for number in range(30)]
    prompts = [prompt(100 + number, 20, base=anchors[number]) for number in range(30)]
    cache = stored(prompts, pages=stage, tokens=600 * PAGE)
    for tokens in anchors:
        cache.compute(tokens)
    cache.settle()
    line = {f"r{number}": tokens for number, tokens in enumerate(prompts)}
    for rid, tokens in line.items():
        cache.want(rid, tokens)
    for _ in range(5):
        cache.step()
        check(cache, content=False)
        assert cache.tree.protected_size() == 0
    hits = admit_in_line(cache, line)
    assert hits == 30 * 29 * PAGE and cache.buffer.context.counters["prefetch_timeouts"] == 0
    cache.settle()
    check_idle(cache)


def test_parked_hits_do_not_keep_others_from_the_store():
    """However many wait with their pages in the stage, the next one is asked for; with no hit it
    is ready at once."""
    prompts = [prompt(number, 2) for number in range(60)]
    cache = stored(prompts, pages=200, tokens=200 * PAGE)
    for number, tokens in enumerate(prompts):
        cache.want(f"r{number}", tokens)
    for _ in range(20):
        cache.step()
    assert [cache.state(f"r{number}") for number in range(60)] == [State.STAGED] * 60
    cache.want("missing", prompt(99, 5))
    for _ in range(2):
        cache.step()
    assert cache.tree.check_prefetch_progress("missing") and cache.now == 0
    cache.buffer.prefetches.in_line([])
    cache.settle()
    check_idle(cache)


def test_first_in_line_is_fetched_first():
    """And the stage goes as far as it goes; the order is the scheduler's, not that of arrival."""
    prompts = {f"r{number}": prompt(number, 5) for number in range(6)}
    cache = stored(list(prompts.values()), pages=16)
    for rid, tokens in prompts.items():
        cache.want(rid, tokens)
    cache.buffer.prefetches.in_line(["r4", "r2", "r5", "r0", "r1", "r3"])
    for _ in range(6):
        cache.step()
        check(cache)
    staged = [rid for rid in prompts if cache.state(rid) is State.STAGED]
    assert sorted(staged) == ["r2", "r4", "r5"]
    assert cache.stage.used(Direction.PREFETCH) == 12
    line = {rid: prompts[rid] for rid in ["r4", "r2", "r5", "r0", "r1", "r3"]}
    assert admit_in_line(cache, line, lambda: check(cache)) == 6 * 4 * PAGE
    cache.settle()
    check_idle(cache)


@pytest.mark.hazard("back-pressure-deadlock")
def test_the_last_in_line_gives_its_pages_back():
    """The scheduler waits for a request that came to the front behind others whose pages fill the
    stage; they are fetched anew in their turn."""
    prompts = {f"r{number}": prompt(number, 5) for number in range(4)}
    cache = stored(list(prompts.values()), pages=16)
    for rid in ("r0", "r1", "r2"):
        cache.want(rid, prompts[rid])
    for _ in range(6):
        cache.step()
    cache.want("r3", prompts["r3"])
    for _ in range(3):
        cache.step()
    assert cache.state("r3") is State.FOUND and cache.stage.capacity(Direction.PREFETCH) == 0
    cache.buffer.prefetches.in_line(["r3", "r0", "r1", "r2"])
    assert not cache.tree.check_prefetch_progress("r3")
    cache.step(work=False)
    check(cache)
    assert [cache.state(rid) for rid in ("r3", "r0", "r1", "r2")] == [
        State.FETCHING, State.STAGED, State.STAGED, State.FOUND,
    ]  # fmt: skip
    line = {rid: prompts[rid] for rid in ("r3", "r0", "r1", "r2")}
    assert admit_in_line(cache, line, lambda: check(cache)) == 4 * 4 * PAGE
    cache.settle()
    check_idle(cache)


def test_a_request_that_is_in_no_queue_any_more():
    """Whoever ended it, and whether or not anybody was told: it keeps no page."""
    cache = stored([prompt(1, 5), prompt(2, 5)])
    cache.want("gone", prompt(1, 5))
    cache.want("here", prompt(2, 5))
    for _ in range(4):
        cache.step()
    assert cache.stage.used() == 8
    cache.buffer.prefetches.in_line(["here"])
    assert cache.prefetch("gone") is None and cache.stage.used() == 4
    cache.buffer.prefetches.in_line([])
    cache.settle()
    check_idle(cache)


def test_a_miss_is_asked_again_while_its_request_waits():
    """In a burst over several servers one computes and writes what all of them want. Nobody waits
    for the answer, and after a few times it is enough."""
    cache = stored([prompt(1, 5)])
    content = dict(cache.store.content)
    cache.store.content.clear()
    cache.want("r", prompt(1, 5))
    for _ in range(2):
        cache.step()
    assert cache.state("r") is State.MISSED and cache.tree.check_prefetch_progress("r")
    cache.now += 0.6
    cache.step(work=False)
    assert cache.store_calls("batch_exists") == 1 and cache.prefetch("r").query is not None
    assert cache.tree.check_prefetch_progress("r"), "nobody waits for the second answer"
    cache.step()
    assert cache.state("r") is State.MISSED
    cache.store.content.update(content)
    cache.now += 2.1
    for _ in range(4):
        cache.step()
    assert cache.state("r") is State.STAGED
    assert cache.tree.check_prefetch_progress("r")
    assert cache.compute(prompt(1, 5), rid="r") == 4 * PAGE
    cache.settle()
    cache.store.calls.clear()
    cache.want("never", prompt(3, 5))
    for _ in range(20):
        cache.now += 10.0
        cache.step()
    assert cache.store_calls("batch_exists") == 1 + len(AGAIN_MS)
    cache.tree.release_aborted_request("never")
    cache.settle()
    check_idle(cache)


@pytest.mark.parametrize("alone", [False, True])
def test_what_is_asked_again_keeps_nobody_waiting(alone: bool):
    """Guards against a line of misses that is asked for again all at once, though nobody waits for
    that: with a slow store a request that arrives then would wait for all of their answers."""
    cache = Cache(alone=alone)
    for number in range(9):
        cache.want(f"r{number}", prompt(number, 5))
    cache.settle_until_done("r8")
    cache.now += 0.6
    cache.step(work=False)
    cache.want("new", prompt(99, 5))
    cache.step(work=False)
    cache.threads["query"].run(THREADS)
    cache.step(work=False)
    assert cache.state("new") is State.MISSED
    cache.store.calls.clear()
    for _ in range(9):
        cache.step()
    assert cache.store_calls("batch_exists") == 8, "and then the others, one at a time"
    cache.buffer.prefetches.in_line([])
    cache.settle()
    check_idle(cache)


@pytest.mark.parametrize("alone", [False, True])
def test_the_rest_of_a_hit_is_asked_for_again(alone: bool):
    """The turn before may still be on its way to the store, from another server. Its beginning is
    there, and nobody waits for the second answer; after a few times it is enough."""
    cache = stored([prompt(1, 9)], alone=alone)
    content = dict(cache.store.content)
    cache.store.drop(*list(content)[3:])
    cache.want("r", prompt(1, 9))
    for _ in range(4):
        cache.step()
    assert cache.buffer.prefetches.loadable("r", 0, 36) == 3 * PAGE
    cache.store.calls.clear()
    for seconds in (0.6, 2.1):
        cache.now += seconds
        cache.step(work=False)
        check(cache)
        assert cache.prefetch("r").query is not None and cache.state("r") is State.STAGED
        assert cache.tree.check_prefetch_progress("r"), "nobody waits for it"
        if seconds == 2.1:
            cache.store.content.update(content)
        cache.step()
        check(cache)
    for _ in range(3):
        cache.step()
    assert cache.state("r") is State.STAGED and cache.tree.check_prefetch_progress("r")
    gets = [keys for method, keys in cache.store.calls if method == "batch_get_v1"]
    assert sum(map(len, gets)) == 5, "what is there is not fetched again"
    assert cache.compute(prompt(1, 9), rid="r") == 8 * PAGE
    cache.settle()
    check_idle(cache)
    cache.store.calls.clear()
    cache.want("never", prompt(9, 5, base=prompt(1, 9)))
    cache.flush()
    cache.want("never", prompt(9, 5, base=prompt(1, 9)))
    for _ in range(20):
        cache.now += 10.0
        cache.step()
        check(cache)
    assert cache.store_calls("batch_exists") == 2 + len(AGAIN_MS), "a hit is asked for in two"
    assert cache.compute(prompt(9, 5, base=prompt(1, 9)), rid="never") == 9 * PAGE
    cache.settle()
    check_idle(cache)


def test_an_admission_that_sees_what_a_load_needs():
    """SGLang counts the pages of a hit in the stage before it admits the request: it is told of
    them, but not of more than the request may take over."""
    cache = stored([prompt(1, 9)])
    cache.want("r", prompt(1, 9))
    for _ in range(4):
        cache.step()
    prefetches = cache.buffer.prefetches
    assert prefetches.loadable("r", 0, 36) == 8 * PAGE
    assert prefetches.loadable("r", 0, 5 * PAGE + 1) == 5 * PAGE
    assert prefetches.loadable("r", 3 * PAGE, 36) == 5 * PAGE
    assert prefetches.loadable("r", 9 * PAGE, 36) == prefetches.loadable("other", 0, 36) == 0
    cache.tree.release_aborted_request("r")
    cache.settle()
    check_idle(cache)


def test_a_step_with_nothing_new_looks_at_nobody(monkeypatch: pytest.MonkeyPatch):
    """Hits in the stage, hits that it is too full for, those behind one with the same prefix, and
    what the store has not: a thousand that wait would cost each step milliseconds."""
    prompts = [prompt(number, 5) for number in range(8)]
    prompts += [prompt(90 + number, 1, base=prompts[7]) for number in range(3)]
    cache = stored(prompts[2:], tokens=200 * PAGE)
    line = {f"r{number}": tokens for number, tokens in enumerate(prompts)}
    for rid, tokens in line.items():
        cache.want(rid, tokens)
    for _ in range(8):
        cache.buffer.prefetches.in_line(line)
        ready = [rid for rid in line if cache.tree.check_prefetch_progress(rid)]
        cache.step()
    assert ready == [f"r{number}" for number in range(5)]
    for _ in range(2):
        cache.buffer.prefetches.in_line(line)
        cache.step()
    assert [cache.state(rid).name for rid in line] == (
        ["MISSED"] * 2 + ["STAGED"] * 3 + ["FOUND"] * 6
    )
    with monkeypatch.context() as patched:
        patched.setattr(WaitingLine, "__iter__", lambda line: pytest.fail("all are looked at"))
        patched.setattr(cache.tree, "match_prefix", lambda params: pytest.fail("one is matched"))
        for _ in range(3):
            cache.buffer.prefetches.in_line(line)
            cache.tree.check_hicache_events()
        assert not any(cache.tree.check_prefetch_progress(rid) for rid in list(line)[5:])
    assert admit_in_line(cache, line, lambda: check(cache)) == (6 * 4 + 3 * 5) * PAGE
    cache.settle()
    check_idle(cache)


def test_who_waits_is_matched_when_the_tree_has_more_for_it(monkeypatch: pytest.MonkeyPatch):
    """Every request that ends inserts something: to match all prompts that wait for the stage would
    take each such step longer than its batch. What the tree has of them is used meanwhile."""
    base, prompts = prompt(1, 4), [prompt(10 + number, 8, base=prompt(1, 4)) for number in range(6)]
    cache = stored(prompts, tokens=200 * PAGE)
    cache.compute(base)
    cache.settle()
    line = {f"r{number}": tokens for number, tokens in enumerate(prompts)}
    for rid, tokens in line.items():
        cache.want(rid, [*tokens, 0])
    for _ in range(8):
        cache.buffer.prefetches.in_line(line)
        cache.step()
        ready = [rid for rid in line if cache.tree.check_prefetch_progress(rid)]
    waits = [rid for rid in line if cache.state(rid) is State.FOUND]
    assert len(waits) >= 4 and not set(waits) & set(ready)
    shared = nodes(cache.tree)[0]
    used = shared.last_access_time
    cache.compute(prompt(99, 2))
    with monkeypatch.context() as patched:
        patched.setattr(cache.tree, "match_prefix", lambda params: pytest.fail("one is matched"))
        assert not any(map(cache.tree.check_prefetch_progress, waits))
    assert shared.last_access_time > used
    cache.compute([*line[waits[-1]], *prompt(99, 1)])  # by another request
    for _ in range(2):  # SGLang may have found no place for it
        assert [rid for rid in waits if cache.tree.check_prefetch_progress(rid)] == waits[-1:]
    cache.evict(1000)  # and gone again, with what it hangs below
    assert not any(map(cache.tree.check_prefetch_progress, waits))
    admit_in_line(cache, line, lambda: check(cache))
    cache.settle()
    check_idle(cache)


def measured(cache: Cache, call_seconds: float) -> None:
    """A store whose calls take so long, and a model that computes 1,000 tokens a second."""
    cache.buffer.ran(1.0, 1000)
    cache.buffer.prefetches.fetches.call_seconds.add(call_seconds)
    cache.buffer.prefetches.fetches.call_bytes.add(1e6)


@pytest.mark.parametrize("always", [False, True])
def test_a_hit_that_would_be_slower_is_computed(always: bool):
    """Sixteen tokens take 16 ms to compute. Nobody waits for a call of a second for them."""
    cache = stored([prompt(1, 5)], settings={"always_fetch": always})
    measured(cache, 1.0)
    cache.want("r", prompt(1, 5))
    for _ in range(4):
        cache.step()
    assert cache.state("r") is (State.STAGED if always else State.MISSED)
    assert cache.tree.check_prefetch_progress("r") and cache.now == 0
    assert cache.compute(prompt(1, 5), rid="r") == (4 * PAGE if always else 0)
    choice = Choice.UNMEASURED if always else Choice.UNASKED
    assert cache.buffer.context.choices == {choice: 1}
    cache.settle()
    check_idle(cache)


@pytest.mark.parametrize("alone", [False, True])
def test_nobody_waits_for_an_answer_that_changes_nothing(alone: bool):
    """An answer takes a step of the scheduler, and so would every request whose few new tokens are
    computed sooner than anything is fetched. One in sixteen is asked for, to see whether it still
    is so."""
    cache = stored([prompt(1, 5)], alone=alone)
    measured(cache, 1.0)
    ready = []
    for number in range(16):
        cache.want(f"r{number}", prompt(1, 5))
        cache.step(work=False)
        ready.append(cache.tree.check_prefetch_progress(f"r{number}"))
        cache.buffer.prefetches.in_line([f"r{number}"])
    assert ready == [True] * 15 + [False] and cache.buffer.context.choices[Choice.UNASKED] == 15
    for _ in range(3):
        cache.step()
    assert cache.compute(prompt(1, 5), rid="r15") == 4 * PAGE
    assert cache.buffer.context.choices[Choice.TRIAL] == 1
    cache.settle()
    check_idle(cache)


@pytest.mark.parametrize("alone", [False, True])
def test_a_hit_that_turns_out_to_be_short(alone: bool):
    """All that is missing would take longer to compute than to fetch; what there is does not."""
    cache = stored([prompt(1, 4)], alone=alone)
    measured(cache, 0.03)
    tokens = prompt(2, 6, base=prompt(1, 4))
    cache.want("r", tokens)
    for _ in range(4):
        cache.step()
        check(cache)
    assert cache.state("r") is State.MISSED and cache.store_calls("batch_get_v1") == 0
    assert cache.buffer.context.choices == {Choice.SLOWER: 1}
    assert cache.compute(tokens, rid="r") == 0
    cache.settle()
    check_idle(cache)


@pytest.mark.parametrize("alone", [False, True])
def test_a_part_may_be_worth_it_where_all_is_not(alone: bool):
    """Twenty-five pages would take two rounds of calls, of 60 ms each, and 100 ms to compute. The
    store has those of the first round."""
    hit = prompt(1, 24)
    cache = stored([hit], alone=alone)
    measured(cache, 0.06)
    tokens = prompt(2, 2, base=hit)
    cache.want("r", tokens)
    for _ in range(40):
        cache.step()
        check(cache)
        if cache.tree.check_prefetch_progress("r"):
            break
    assert cache.buffer.context.choices == {Choice.FASTER: 1}
    assert cache.compute(tokens, rid="r") == 24 * PAGE and cache.now == 0
    cache.settle()
    check_idle(cache)


@pytest.mark.parametrize("alone", [False, True])
def test_one_in_sixteen_waits_for_a_store_that_has_nothing(alone: bool):
    """Its answer says nothing of how fast it is; a trial has been made all the same."""
    cache = Cache(alone=alone)
    measured(cache, 1.0)
    waits = []
    for number in range(48):
        cache.want(f"r{number}", prompt(number, 5))
        cache.step(work=False)
        waits.append(not cache.tree.check_prefetch_progress(f"r{number}"))
        cache.step()
        cache.step()
        assert cache.tree.check_prefetch_progress(f"r{number}")
        cache.buffer.prefetches.in_line([])
    assert waits == ([False] * 15 + [True]) * 3
    cache.settle()
    check_idle(cache)


@pytest.mark.parametrize("alone", [False, True])
def test_a_fetch_goes_on_when_the_rest_is_found(alone: bool):
    """The calls that are under way for a hit of twelve pages would count against the fourteen that
    it has grown to, as if all were still to come and behind them: it would be given up for slow."""
    tokens = prompt(1, 15)
    cache = stored([tokens], alone=alone)
    content = dict(cache.store.content)
    cache.store.drop(*list(content)[12:])
    measured(cache, 0.04)
    cache.want("r", tokens)
    for _ in range(3):
        cache.threads["query"].run()
        cache.step(work=False)
    assert cache.state("r") is State.FETCHING and cache.stage.used() == 12
    cache.store.content.update(content)
    cache.now += 0.6
    for _ in range(3):
        cache.threads["query"].run()
        cache.calm()
        cache.step(work=False)
        check(cache)
        assert cache.state("r") is State.FETCHING and cache.stage.used() == 12
    assert len(cache.prefetch("r").keys) == 14
    for _ in range(20):
        cache.step()
        check(cache)
        if cache.tree.check_prefetch_progress("r"):
            break
    assert cache.compute(tokens, rid="r") == 14 * PAGE
    assert cache.buffer.context.choices == {Choice.FASTER: 1}
    cache.settle()
    check_idle(cache)


@pytest.mark.parametrize("how", ["aborted", "gone", "out of time"])
def test_who_waited_for_the_stage_waits_no_more(how: str):
    """Nobody behind it was looked at. Now the next one is: it is computed sooner, unless the first,
    which computes now, takes longer than a fetch."""
    first, short = prompt(3, 9), prompt(1, 4)
    cache = stored([first, short])
    measured(cache, 0.03)
    hog = cache.stage.allocate(Direction.PREFETCH, cache.stage.capacity(Direction.PREFETCH))
    cache.hogs.append(hog)
    cache.want("first", first)
    cache.want("r", prompt(2, 6, base=short))
    for _ in range(4):
        cache.step()
        check(cache)
    assert cache.state("first") is cache.state("r") is State.FOUND
    if how == "aborted":
        cache.tree.release_aborted_request("first")
    elif how == "gone":
        cache.buffer.prefetches.in_line(["r"])
    else:
        assert not cache.tree.check_prefetch_progress("first")
        cache.step()
        cache.now += 10.1
    assert cache.prefetch("r").choice is None
    cache.step()
    slower = how != "out of time"
    assert cache.prefetch("r").choice is (Choice.SLOWER if slower else Choice.FASTER)
    assert cache.state("r") is (State.MISSED if slower else State.FOUND)
    hog.release()
    cache.hogs.clear()
    cache.buffer.prefetches.in_line([])
    cache.settle()
    check_idle(cache)


def test_a_slow_hit_comes_in_time_for_the_end_of_the_line():
    """Those before it compute for longer than its call takes."""
    prompts = {f"r{number}": prompt(number, 5) for number in range(4)}
    cache = stored([prompts["r3"]])
    measured(cache, 0.05)
    for rid, tokens in prompts.items():
        cache.want(rid, tokens)
    for _ in range(4):
        cache.step()
    assert [cache.state(rid) for rid in prompts] == [State.MISSED] * 3 + [State.STAGED]
    assert cache.buffer.context.choices == {Choice.UNASKED: 3, Choice.FASTER: 1}
    cache.buffer.prefetches.in_line([])
    cache.settle()
    check_idle(cache)


def test_times_of_the_states(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Histograms and the event log say where the time of a request went."""
    monkeypatch.setenv("SGLANG_DISAGGREGATION_EVENT_LOG", str(tmp_path))
    event_log.event_log.cache_clear()
    cache = stored([prompt(1, 5)])
    cache.buffer.context.times.take()
    cache.want("r", prompt(1, 5))
    for seconds in (1.0, 2.0, 4.0, 8.0, 16.0):
        cache.now += seconds
        cache.step()
    assert cache.compute(prompt(1, 5), rid="r") == 4 * PAGE
    cache.now += 32.0
    cache.settle()
    assert dict(cache.buffer.context.times.take()) == {
        "prefetch_query_seconds": 3.0,
        "prefetch_wait_seconds": 0.0,
        "prefetch_fetch_seconds": 4.0,
        "prefetch_staged_seconds": 24.0,
        "load_back_seconds": 32.0,
    }
    (file,) = tmp_path.glob("hicache-*.jsonl")
    event_log.event_log.cache_clear()
    event = msgspec.json.decode(file.read_bytes(), type=event_log.Prefetched)
    assert (event.rid, event.loaded_tokens, event.choice) == ("r", 16, "unmeasured")
    spent = (event.query_ms, event.wait_ms, event.fetch_ms, event.staged_ms)
    assert spent == (3000, 0, 4000, 24000)
