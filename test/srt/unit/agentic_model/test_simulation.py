"""The simulation: nothing is lost or made up, and known queues come out as they should."""

from __future__ import annotations

import dataclasses
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmark.agentic.model.costs import Costs, Transfer
from benchmark.agentic.model.sim.decode import DecodeConfig, DecodeWorker
from benchmark.agentic.model.sim.fleet import Fleet, FleetConfig, Run
from benchmark.agentic.model.sim.jobs import Job, SharedPrefixes, from_trace
from benchmark.agentic.model.sim.outcome import outcome
from benchmark.agentic.model.sim.prefill import PrefillConfig
from benchmark.traces.record import Record
from effort import tries

pytestmark = pytest.mark.slow

ENDLESS = 10**9


def costs(**changed: object) -> Costs:
    fields: dict[str, object] = {
        "kv_token_bytes": 100,
        "prefill_batch_s": 0.001,
        "prefill_token_s": 1e-4,
        "prefill_pair_s": 1e-8,
        "step_s": 0.01,
        "step_request_s": 0.001,
        "step_context_s": 1e-6,
        "transfer": Transfer(((1e6, 0.1),), latency_s=0.005),
        **changed,
    }
    return Costs(**fields, sources=dict.fromkeys(fields, "made up"))


def jobs(seed: int, count: int, block: int = 8) -> list[Job]:
    """Short prompts with a few prefixes, all within a few seconds."""
    rng = random.Random(seed)
    made = []
    for number in range(count):
        shared = rng.randrange(5)
        own = rng.randrange(4)
        prefix = rng.randrange(3)
        blocks = (
            *(100 * prefix + i for i in range(shared)),
            *(10_000 + 10 * number + i for i in range(own)),
        )
        prompt = len(blocks) * block + rng.randrange(1, block)
        made.append(Job(number, number * rng.random() * 0.02, prompt, rng.randrange(1, 40), blocks))
    return sorted(made, key=lambda job: job.arrival)


def fleet(
    pool: int = 300,
    *,
    radix: bool = True,
    gentle: bool = True,
    reserved: int = 8,
    max_running: int = 8,
    decode_policy: str = "delta_kv",
    made_of: Costs | None = None,
    aggregated: bool = False,
) -> Fleet:
    config = FleetConfig(
        PrefillConfig(400, chunk=32),
        DecodeConfig(pool, radix, reserved, max_running, page=4, gentle=gentle),
        prefill_workers=0 if aggregated else 2,
        decode_workers=2,
        decode_policy=decode_policy,
        block_tokens=8,
    )
    return Fleet(config, made_of or costs())


def empty(run: Run) -> bool:
    """No worker holds anything for a request any more."""
    pools = [w.pool for w in (*run.prefill, *run.decode)]
    for pool in pools:
        pool.check()
    return all(pool.private == 0 and pool.locks == 0 for pool in pools)


@settings(max_examples=tries(60), deadline=None)
@given(
    seed=st.integers(0, 10**6),
    pool=st.sampled_from([80, 120, 300, 1000]),
    radix=st.booleans(),
    gentle=st.booleans(),
    reserved=st.sampled_from([1, 8, 32]),
    max_running=st.sampled_from([1, 3, 64]),
    policy=st.sampled_from(["round_robin", "least_tokens", "delta_kv"]),
    aggregated=st.booleans(),
)
def test_every_request_ends_once_and_no_pool_overflows(
    seed: int,
    pool: int,
    radix: bool,
    gentle: bool,
    reserved: int,
    max_running: int,
    policy: str,
    aggregated: bool,
) -> None:
    """Small pools force eviction, waiting and retraction; a slip there loses or doubles memory."""
    made = jobs(seed, 40)
    simulated = fleet(
        pool,
        radix=radix,
        gentle=gentle,
        reserved=reserved,
        max_running=max_running,
        decode_policy=policy,
        aggregated=aggregated,
    )
    run = simulated.run(made)
    for routing in (simulated._to_prefill, simulated._to_decode):
        left = (routing.requests, routing.pending, routing.ongoing, routing.added)
        assert not any(of.any() for of in left), "said to be under way when all has ended"
    assert sorted(job.number for job in run.jobs) == list(range(40))
    assert empty(run)
    for job in run.jobs:
        if job.rejected:
            assert job.prompt + max(job.output, reserved) > pool - 4
            continue
        assert job.arrival <= job.admitted <= job.prefilled <= job.landed <= job.first_token
        assert job.first_token <= job.finished
        assert job.moved == (0 if aggregated else job.prompt - job.decode_hit)
        assert radix or not job.decode_hit


@settings(max_examples=tries(30), deadline=None)
@given(seed=st.integers(0, 10**6), radix=st.booleans(), gentle=st.booleans())
def test_pool_holds_exactly_what_its_requests_hold(seed: int, radix: bool, gentle: bool) -> None:
    """Whenever a decode worker has settled, private tokens are the sum over its requests."""
    simulated = fleet(200, radix=radix, gentle=gentle, reserved=4)
    seen: list[Job] = []
    checked = 0

    def check(worker: DecodeWorker) -> None:
        nonlocal checked
        mine = [job for job in seen if job.decode == worker.number and job.finished < 0]
        running = {id(entry[2]) for entry in worker.running}
        grown = sum(worker._steps - job.joined_step for job in mine if id(job) in running)
        assert worker.pool.private == sum(job.private for job in mine) + grown
        assert worker.pool.locks == sum(job.locked for job in mine)
        worker.pool.check()
        checked += 1

    for worker in simulated.decode:
        schedule = worker._schedule

        def settled(worker: DecodeWorker = worker, schedule: object = schedule) -> None:
            check(worker)
            schedule()

        worker._schedule = settled
    made = jobs(seed, 30)
    seen += made
    simulated.run(made)
    assert checked > 30


def test_the_same_jobs_give_the_same_run() -> None:
    """Ties in time must not be broken by anything but the order of events."""
    first, second = (outcome(fleet().run(jobs(3, 60), sample_s=0.01)) for _ in range(2))
    assert dataclasses.asdict(first) == dataclasses.asdict(second)
    workload = SharedPrefixes(50, 3, 16, 8, 20, 3, 5, block=8)
    closed = [outcome(fleet().run(workload.jobs(7), 9, sample_s=0.01)) for _ in range(2)]
    assert closed[0] == closed[1]
    assert closed[0] != outcome(fleet().run(workload.jobs(8), concurrency=9))


def test_with_endless_memory_and_no_wire_the_flag_changes_only_what_moves() -> None:
    """Whatever else differed would be an effect of the simulation, not of the cache."""
    free = costs(transfer=Transfer(((1e6, 0.0),)))
    ended = {}
    for radix in (False, True):
        simulated = fleet(
            ENDLESS,
            radix=radix,
            gentle=False,
            max_running=1000,
            decode_policy="round_robin",
            made_of=free,
        )
        run = simulated.run(jobs(1, 80))
        ended[radix] = run
    times = [
        [(j.number, j.first_token, j.finished) for j in ended[radix].jobs]
        for radix in (False, True)
    ]
    assert times[0] == times[1]
    moved = [sum(j.moved for j in ended[radix].jobs) for radix in (False, True)]
    assert moved[1] < moved[0]


def test_prefill_as_an_m_d_1_queue() -> None:
    """Poisson arrivals, a constant service: the mean wait is rho / 2 (1 - rho) services."""
    service, load, count = 1.0, 0.7, 40_000
    only_prefill = costs(
        prefill_batch_s=0.0,
        prefill_token_s=service / 10,
        prefill_pair_s=0.0,
        transfer=Transfer(((1e6, 0.0),)),
    )
    rng = random.Random(5)
    at, made = 0.0, []
    for number in range(count):
        at += rng.expovariate(load / service)
        made.append(Job(number, at, 10, 1, ()))
    config = FleetConfig(PrefillConfig(ENDLESS, chunk=10), DecodeConfig(ENDLESS, max_running=1000))
    run = Fleet(config, only_prefill).run(made)
    waits = [job.prefilled - job.arrival - service for job in run.jobs]
    assert sum(waits) / count == pytest.approx(load / (2 * (1 - load)) * service, rel=0.05)


def test_a_lone_request_by_hand() -> None:
    """Two chunks of prefill, the second one's transfer after it, then 9 growing steps."""
    run = fleet(radix=False).run([Job(0, 0.0, 40, 10, ())])
    (job,) = run.jobs
    first = 0.001 + 32 * 1e-4 + 1e-8 * 32 * 16
    second = 0.001 + 8 * 1e-4 + 1e-8 * 8 * (32 + 4)
    assert job.prefilled == pytest.approx(first + second)
    assert job.landed == pytest.approx(first + second + 8 * 100 / 1e7 + 0.005)
    steps = sum(0.011 + 1e-6 * (40 + i) for i in range(9))
    assert job.finished - job.first_token == pytest.approx(steps)


def test_an_aggregated_server_stands_still_while_it_prefills() -> None:
    """The first request's answer waits for the second one's prompt, and no longer."""
    config = FleetConfig(
        PrefillConfig(400), DecodeConfig(ENDLESS), prefill_workers=0, block_tokens=8
    )
    (alone,) = Fleet(config, costs()).run([Job(0, 0.0, 40, 10, ())]).jobs
    assert alone.first_token == pytest.approx(0.001 + 40 * 1e-4 + 1e-8 * 40 * 20)
    run = Fleet(config, costs()).run([Job(0, 0.0, 40, 10, ()), Job(1, 0.05, 400, 2, ())])
    first, second = sorted(run.jobs, key=lambda job: job.number)
    prefill = 0.001 + 400 * 1e-4 + 1e-8 * 400 * 200
    shared_step = 0.001 + 1e-6 * 400
    assert second.first_token - second.admitted == pytest.approx(prefill)
    assert first.finished - alone.finished == pytest.approx(prefill + shared_step, rel=0.01)
    assert outcome(run).link_busy == 0


def test_a_running_batch_gives_way_when_the_pool_is_full() -> None:
    """Reserving one token a request lets in too many: the youngest must go, and come back."""
    made = [Job(i, 0.0, 40, 60, ()) for i in range(4)]
    run = fleet(130, radix=False, gentle=False, reserved=1).run(made)
    assert outcome(run).retracted > 0
    assert empty(run) and all(job.finished > 0 for job in run.jobs)


def test_a_burst_with_one_prefix_moves_it_once_if_requests_wait_for_it() -> None:
    """Upstream's admission moves a copy for each; this patch set's waits for the first."""
    moved = {}
    for gentle in (False, True):
        made = [Job(i, 0.0, 41, 5, (1, 2, 3, 4, 100 + i)) for i in range(2)]
        config = FleetConfig(
            PrefillConfig(400),
            DecodeConfig(400, True, 8, gentle=gentle),
            block_tokens=8,
        )
        moved[gentle] = outcome(Fleet(config, costs()).run(made)).moved_tokens
    assert moved == {False: 82, True: 41 + 9}


def test_delta_kv_goes_where_the_conversation_is() -> None:
    """A second turn finds its first turn on one of many decode workers."""
    records = [
        Record(1000 * i, 512 * 4 + 1, 2, (10 * i, 10 * i + 1, 10 * i + 2, 10 * i + 3, 10 * i + 4))
        for i in range(6)
    ]
    again = [
        Record(60_000 + r.timestamp, r.input_length + 512, 2, (*r.hash_ids[:4], 1000 + i, 2000 + i))
        for i, r in enumerate(records)
    ]
    hits = {}
    for name in ("round_robin", "delta_kv"):
        config = FleetConfig(
            PrefillConfig(10**6),
            DecodeConfig(10**6, True, gentle=True),
            decode_workers=5,
            decode_policy=name,
        )
        run = Fleet(config, costs()).run(from_trace([*records, *again]))
        hits[name] = sum(job.decode_hit for job in run.jobs)
    assert hits["delta_kv"] == 6 * 4 * 512
    assert hits["round_robin"] < hits["delta_kv"] / 2


def test_what_cannot_fit_is_rejected_and_harms_nobody() -> None:
    run = fleet(100).run([Job(0, 0.0, 200, 5, ()), Job(1, 0.0, 20, 5, ())])
    assert [(job.number, job.rejected) for job in run.jobs] == [(0, True), (1, False)]
    assert outcome(run).rejected == 1 and empty(run)


def test_bad_settings_name_themselves() -> None:
    with pytest.raises(ValueError, match="--decode-policy fastest"):
        fleet(decode_policy="fastest")
    with pytest.raises(ValueError, match="no whole number of blocks"):
        SharedPrefixes(1, 1, 10, 1, 1, block=3)
