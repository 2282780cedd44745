"""What the router believes of a worker: charges, shadow index, sessions; all of it bounded."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmark.agentic.router.body import GENERATE, Ask, read
from benchmark.agentic.router.policies import Work
from benchmark.agentic.router.prefixes import PrefixIndex
from benchmark.agentic.router.schedule import NoWorker, Pins, Route, Scheduler
from benchmark.agentic.router.settings import Settings
from benchmark.agentic.router.state import COLOCATED, DECODE, PREFILL, Charge, Worker
from effort import tries


def release(route: Route) -> None:
    for charge in route.charges.values():
        charge.release()


def ask(ids: list[int], session: str | None = None, max_new_tokens: int = 8) -> Ask:
    body = f'{{"input_ids":{ids},"sampling_params":{{"max_new_tokens":{max_new_tokens}}}}}'
    return read(GENERATE, body.encode(), session, block_tokens=4)


def scheduler(**more: object) -> Scheduler:
    """Two colocated workers unless told otherwise; all up."""
    given_ = {"block_tokens": 4, "pool_tokens": 400, **more}
    if not {"workers", "prefills", "decodes"} & set(more):
        given_["workers"] = ("http://a", "http://b")
    made = Scheduler(Settings(**given_))  # type: ignore[arg-type]
    for worker in made.workers:
        worker.check_passed()
    return made


def load(worker: Worker) -> tuple[int, int, int, int]:
    return worker.requests, worker.pending_tokens, worker.ongoing_tokens, worker.added_tokens


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["charge", "computed", "release"]),
            st.integers(0, 9),
            st.integers(0, 5000),
            st.integers(0, 5000),
        )
    )
)
def test_charges_add_up_and_return_to_zero(
    steps: list[tuple[str, int, int, int]],
) -> None:
    """Guards against a charge that is given back twice or not at all, in any order of calls."""
    worker = Worker(PREFILL, "http://a")
    charges: list[Charge] = []
    for step, which, tokens, matched in steps:
        if step == "charge":
            charges.append(worker.charge(Work(tokens, 10), min(tokens, matched)))
        elif charges:
            getattr(charges[which % len(charges)], step)()
        assert min(load(worker)) >= 0
        assert worker.requests == sum(not charge.released for charge in charges)
    for charge in charges:
        charge.release()
        charge.release()
        charge.computed()
    assert load(worker) == (0, 0, 0, 0)


def test_what_a_charge_is_made_of() -> None:
    """Guards the numbers that policies see: cached tokens are neither pending nor added."""
    worker = Worker(DECODE, "http://a")
    charge = worker.charge(Work(100, 10), 60)
    assert load(worker) == (1, 40, 110, 50)
    charge.computed()
    assert load(worker) == (1, 0, 110, 50)


def test_the_index_forgets_the_end_of_the_oldest_prompt_first() -> None:
    """Guards the order of eviction: a block may not outlive those before it, which it needs."""
    index = PrefixIndex(5)
    index.learn([1, 2, 3])
    index.learn([1, 2, 13, 14])
    assert (index.match([1, 2, 3]), index.match([1, 2, 13, 14])) == (3, 4)
    index.learn([21])
    assert (index.match([1, 2, 3]), index.match([1, 2, 13, 14]), len(index)) == (2, 4, 5)
    index.learn([21, 22, 23])
    assert (index.match([1, 2, 13, 14]), index.match([21, 22, 23])) == (2, 3)


def test_matching_does_not_keep_a_prompt_alive() -> None:
    """Guards against candidates that were not chosen refreshing what they hold."""
    index = PrefixIndex(2)
    index.learn([1])
    index.learn([2])
    index.match([1])
    index.learn([3])
    assert index.match([1]) == 0 and index.match([2]) == 1


def test_what_lay_behind_a_forgotten_block_stays_forgotten() -> None:
    """Guards against prompts that come back to life when a block they share is learned again."""
    index = PrefixIndex(10)
    index.learn([1, 2, 3])
    index.forget([2])
    index.learn([1, 2, 4])
    assert index.match([1, 2, 4]) == 3
    assert index.match([1, 2, 3]) == 2


@given(st.lists(st.lists(st.integers(0, 30), max_size=12, unique=True)), st.integers(0, 20))
def test_the_index_never_exceeds_its_capacity(prompts: list[list[int]], capacity: int) -> None:
    """Guards the bound; what was learned last is held as far as it fits."""
    index = PrefixIndex(capacity)
    for prompt in prompts:
        index.learn(prompt)
        assert len(index) <= capacity
        assert index.match(prompt) == min(len(prompt), capacity)


def test_a_worker_that_held_less_than_believed_loses_what_depends_on_it() -> None:
    """Guards the correction by what an answer reports."""
    worker = Worker(PREFILL, "http://a", block_tokens=4, pool_tokens=400)
    one, other = ask([1] * 16 + [2] * 16), ask([1] * 16 + [3] * 16)
    for known in (one, other):
        worker.index.learn(known.prompt.hashes)
    worker.correct(one.prompt.hashes, 8, held_share=0.25)
    worker.index.learn(one.prompt.hashes)
    assert worker.view(one.prompt.hashes, one.work).matched_tokens == 32
    # It may hold the four blocks that both share, which were just computed again; no more.
    assert worker.view(other.prompt.hashes, other.work).matched_tokens == 16


def test_one_block_less_than_believed_is_no_news() -> None:
    """Guards against forgetting at every answer: a server computes the last token of any prompt."""
    worker = Worker(PREFILL, "http://a", block_tokens=4, pool_tokens=400)
    one, longer = ask([1] * 16), ask([1] * 20)
    worker.index.learn(longer.prompt.hashes)
    worker.correct(one.prompt.hashes, 4, held_share=15 / 16)
    assert worker.view(longer.prompt.hashes, longer.work).matched_tokens == 20


def test_health_takes_a_worker_out_and_back_with_an_empty_index() -> None:
    """Guards the thresholds, and that nobody believes in the cache of a process that is gone."""
    worker = Worker(DECODE, "http://a", fall=2)
    assert not worker.up
    assert [worker.check_passed() for _ in range(2)] == [True, False]
    worker.index.learn([1, 2])
    assert not worker.check_failed(gone=False)
    assert worker.up and len(worker.index) == 2
    assert worker.check_failed(gone=False)
    assert not worker.up and len(worker.index) == 0
    assert worker.check_passed()


def test_a_worker_restarted_between_two_checks_has_an_empty_index_too() -> None:
    """Guards against a quick restart that no row of failed checks shows."""
    worker = Worker(DECODE, "http://a", fall=3)
    worker.check_passed()
    worker.index.learn([1, 2])
    worker.check_failed(gone=True)
    assert worker.up and len(worker.index) == 0


def test_no_state_grows_with_finished_sessions() -> None:
    """Guards the bounds of the session table and the indices, over many sessions."""
    made = scheduler(max_sessions=1000)
    template = ask([0] * 32)
    for number in range(tries(20_000)):
        session = f"s{number}"
        base = number * 8
        fresh = type(template)(
            path=template.path,
            body=b"",
            prompt=template.prompt,
            work=template.work,
            stream=True,
            rid=session,
            session=session,
        )
        route = made.route(fresh)
        worker = route.charges[COLOCATED].worker
        worker.index.learn(tuple(range(base, base + 8)))
        release(route)
    assert [len(pins) for pins in made.pins.values()] == [1000, 0, 0]
    for worker in made.workers:
        assert load(worker) == (0, 0, 0, 0)
        assert len(worker.index) == worker.index.capacity_blocks == 100


def test_pins_keep_the_most_recent_sessions() -> None:
    """Guards against forgetting a session that is still in use."""
    pins = Pins(2)
    for session in ("a", "b", "a", "c"):
        pins.set(session, "w" + session)
    kept = [pins.get(session)[0] for session in ("a", "b", "c", None)]
    assert kept == ["wa", None, "wc", None]


def test_no_worker_is_named_by_what_is_missing() -> None:
    """Guards the text that a client gets."""
    made = scheduler(prefills=(("http://p", 1),), decodes=("http://d",))
    with pytest.raises(NoWorker, match="no decode worker is available .attempted: http://d"):
        made.route(ask([1]), ["http://d"])
    assert load(made.pools[PREFILL][0]) == (0, 0, 0, 0)


def test_prefill_and_decode_are_chosen_apart() -> None:
    """Guards against one pool's policy or cache deciding for the other."""
    made = scheduler(
        prefills=(("http://p0", 1), ("http://p1", 2)),
        decodes=("http://d0", "http://d1"),
        prefill_policy="round_robin",
        decode_policy="delta_kv",
    )
    request = ask(list(range(64)), "s")
    made.pools[DECODE][1].index.learn(request.prompt.hashes)
    seen = []
    for _ in range(2):
        route = made.route(request)
        seen.append((route.charges[PREFILL].worker.url, route.charges[DECODE].worker.url))
        assert route.picks[DECODE].matched_tokens == 64
        release(route)
    assert seen == [("http://p0", "http://d1"), ("http://p1", "http://d1")]


@pytest.mark.parametrize(
    ("tokens", "cached", "inflight", "outcome"),
    [
        (40, 0, 0, "light"),
        (80, 0, 0, "cold"),
        (80, 40, 0, "offloaded"),
        (80, 40, 1, "capped"),
    ],
)
def test_selective_offload(tokens: int, cached: int, inflight: int, outcome: str) -> None:
    """Guards each gate: heavy, cached enough on prefill, and not too many at once."""
    made = scheduler(
        workers=("http://a",),
        prefills=(("http://p", 1),),
        decodes=("http://d",),
        heavy_threshold=50,
        offload_min_cached=0.5,
        max_offload_inflight=1,
    )
    request = ask(list(range(tokens)))
    prefill = made.pools[PREFILL][0]
    others = []
    if inflight:
        prefill.index.learn(request.prompt.hashes)
        others.append(made.route(request))
        assert others[0].offload == "offloaded"
        prefill.index.clear()
    prefill.index.learn(request.prompt.hashes[: cached // 4])
    route = made.route(request)
    assert route.offload == outcome
    assert set(route.charges) == ({PREFILL, DECODE} if outcome == "offloaded" else {COLOCATED})
    for other in (route, *others):
        release(other)
    if outcome == "capped":
        assert made.route(request).offload == "offloaded"


def test_light_requests_stay_when_there_is_no_pair() -> None:
    """Guards colocated workers against being left when prefill is out."""
    made = scheduler(
        workers=("http://a",),
        prefills=(("http://p", 1),),
        decodes=("http://d",),
        heavy_threshold=50,
    )
    route = made.route(ask(list(range(80))), ["http://p"])
    assert route.offload == "no pair" and set(route.charges) == {COLOCATED}
