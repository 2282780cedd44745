"""Plans of chaos runs: repeatable, and no kind of fault is left out."""

from __future__ import annotations

import pytest

from chaos.plan import CURRENT_EVERY_S, HEAVY, LIGHT, LOCAL, STORE, Plan, make_plans

THREADS = (5,) * 8


def kinds(plan: Plan) -> set[object]:
    return {fault.kind for fault in plan.faults}


def test_a_seed_is_a_plan() -> None:
    """Guards against a failure that cannot be repeated, and against a seed that changes nothing."""
    first, again, other = (make_plans(seed, 2, 60.0, THREADS) for seed in (3, 3, 4))
    assert first == again != other
    assert first[0].sends != first[1].sends


@pytest.mark.parametrize("seed", range(30))
def test_the_long_run_holds_every_fault(seed: int) -> None:
    """Guards against a kind that an arm never meets, whatever it was that its name promises."""
    for heavy in (HEAVY, (*HEAVY, *STORE)):
        for arm in make_plans(seed, 4, 150.0, THREADS, heavy):
            assert kinds(arm) == {*heavy, *LIGHT}
    lights = (*LIGHT, *LOCAL)
    arms = make_plans(seed, 4, 150.0, THREADS, light=lights)
    assert set.union(*map(kinds, arms)) == {*HEAVY, *lights}
    (arm,) = make_plans(seed, 1, 600.0, THREADS, light=lights, every_s=CURRENT_EVERY_S)
    assert kinds(arm) == {*HEAVY, *lights}
