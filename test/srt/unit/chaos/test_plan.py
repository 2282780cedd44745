"""Plans of chaos runs: repeatable, and complete in the run that CI does."""

import pytest

from chaos.plan import (
    CURRENT_EVERY_S,
    HEAVY,
    LIGHT,
    LOCAL,
    STOP_S,
    STORE,
    FaultKind,
    How,
    Plan,
    make_plans,
)

THREADS = (5,) * 8
SEEDS = range(30)


def plans(seed: int, arms: int = 2, seconds: float = 60.0) -> list[Plan]:
    return make_plans(seed, arms, seconds, THREADS)


def test_a_seed_is_a_plan() -> None:
    """Guards against a failure that cannot be repeated, and against a seed that changes nothing."""
    assert plans(3) == plans(3)
    assert plans(3) != plans(4)
    first, second = plans(3)
    assert first.sends != second.sends


@pytest.mark.parametrize("seed", SEEDS)
def test_the_two_minutes_of_ci_hold_every_kind(seed: int) -> None:
    """Guards against a kind of fault or abort that CI never tries, whatever the seed."""
    arms = plans(seed)
    kinds = {fault.kind for arm in arms for fault in arm.faults}
    assert kinds == {*HEAVY, *LIGHT}
    ways = {send.leave.how for arm in arms for send in arm.sends if send.leave}
    assert ways == set(How)


@pytest.mark.parametrize("seed", SEEDS)
def test_an_arm_of_the_long_run_holds_every_fault(seed: int) -> None:
    """Guards against a backend or page size that meets only some of the faults in ten minutes."""
    for arm in plans(seed, arms=4, seconds=150.0):
        assert {fault.kind for fault in arm.faults} == {*HEAVY, *LIGHT}


@pytest.mark.parametrize("seed", SEEDS)
def test_with_a_store_every_arm_of_the_long_run_has_it_fail(seed: int) -> None:
    """Guards against ten minutes in which the store is never stopped or never killed."""
    kinds = (*HEAVY, *STORE)
    for arm in make_plans(seed, 4, 150.0, THREADS, kinds):
        assert {fault.kind for fault in arm.faults} == {*kinds, *LIGHT}
    assert {kind.role for kind in STORE} == {"store"}


@pytest.mark.parametrize("seed", SEEDS)
def test_with_local_turns_decode_is_asked_everything(seed: int) -> None:
    """Guards against ten minutes in which decode is never flushed or never paused."""
    arms = make_plans(seed, 4, 150.0, THREADS, light=(*LIGHT, *LOCAL))
    kinds = [{fault.kind for fault in arm.faults} for arm in arms]
    assert set.union(*kinds) == {*HEAVY, *LIGHT, *LOCAL}
    assert all(len({*LOCAL} & of) >= 2 for of in kinds)
    assert {kind.role for kind in LOCAL} == {"decode"}


@pytest.mark.parametrize("seed", SEEDS)
def test_the_ten_minutes_of_the_later_release_hold_every_fault(seed: int) -> None:
    """Guards against a kind that is left out where faults are fewer."""
    lights = (*LIGHT, *LOCAL)
    (arm,) = make_plans(seed, 1, 600.0, THREADS, light=lights, every_s=CURRENT_EVERY_S)
    assert {fault.kind for fault in arm.faults} == {*HEAVY, *lights}


@pytest.mark.parametrize("seed", SEEDS)
def test_times_are_in_order_and_within_the_arm(seed: int) -> None:
    """Guards against faults that fall behind the end, or on top of one another."""
    for arm in plans(seed):
        times = [action.at for action in arm.actions()]
        assert times == sorted(times)
        assert times[0] >= 0.0 and times[-1] < arm.seconds
        assert len(arm.actions()) == len(arm.sends) + len(arm.faults)
        heavy = [fault for fault in arm.faults if fault.kind in HEAVY]
        for one, other in zip(heavy, heavy[1:], strict=False):
            assert one.at + one.for_s < other.at
        assert [send.number for send in arm.sends] == list(range(len(arm.sends)))


def test_only_stopped_servers_have_a_length() -> None:
    """Guards against a stop too short for decode to notice, which would test nothing."""
    kinds = (*HEAVY, *STORE)
    light = (*LIGHT, *LOCAL)
    arms = [arm for seed in SEEDS for arm in make_plans(seed, 2, 90.0, THREADS, kinds, light)]
    faults = [fault for arm in arms for fault in arm.faults]
    for fault in faults:
        if fault.kind in STOP_S:
            assert STOP_S[fault.kind][0] <= fault.for_s <= STOP_S[fault.kind][1]
        else:
            assert fault.for_s == 0.0
    # Two heartbeats of 2 s, each with 3 s to be answered.
    assert STOP_S[FaultKind.STOP_PREFILL][0] > 2 * (2 + 3)


def test_turns_are_asked_in_order_and_all_of_them() -> None:
    """Guards against a stream of requests that never continues a conversation: the decode tree
    would hold nothing that anybody asks for."""
    (arm,) = plans(0, arms=1, seconds=300.0)
    assert {send.question for send in arm.sends} == set(range(sum(THREADS)))
    last = {}
    for send in arm.sends:
        thread, turn = divmod(send.question, 5)
        before = last.get(thread, 4)
        assert turn in (before, (before + 1) % 5)  # again in a burst, else the next one
        last[thread] = turn
