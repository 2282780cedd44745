"""What the choice is worth: talks, as events, against sending all turns to one side."""

from __future__ import annotations

from dataclasses import replace
from statistics import median

import pytest

from sglang.srt.disaggregation.delta.decode.turn_choice import Measured
from unit.delta.decode.talks import Talks, World

SEEDS = 8
A_TENTH = 1.1

QUIET = World(think=0.3)
#: Talks at other rates, and beside clients whose prompts keep prefill busy.
RATES = {
    "one talk": World(talks=1),
    "two talks": World(talks=2),
    "a pause of 0.1 s": World(think=0.1),
    "a pause of 0.3 s": QUIET,
    "a pause of 1 s": World(think=1.0),
    "24 talks": World(talks=24, think=1.0),
    "a slow decode server": replace(QUIET, chunk=(0.03, 0.0003)),
    "a fast prefill server": World(prefill=(0.004, 0.00002), wire=0.004),
    "others use the machine": replace(QUIET, spikes=0.05),
    "one cold client": World(cold=1),
    "two cold clients": World(cold=2),
    "four cold clients": World(cold=4),
    "two cold clients, and a pause": replace(QUIET, cold=2),
}
IN_EACH_RUN = "a pause of 0.3 s", "others use the machine", "two cold clients"


def arm(world: World, where: str) -> tuple[float, float]:
    """TTFT of later turns (p50) and turns a second, medians over the seeds. The servers have
    answered one talk before, as the benchmark's have."""
    runs = []
    for seed in range(SEEDS):
        first = replace(world, talks=1, turns=4, cold=0)
        measured: Measured = Talks(first, where, 1000 + seed).play().measured
        runs.append(Talks(world, where, seed, measured).play())
    return median(r.ttft_p50 for r in runs), median(r.per_second for r in runs)


@pytest.mark.parametrize(
    "name",
    [
        name if name in IN_EACH_RUN else pytest.param(name, marks=pytest.mark.nightly)
        for name in RATES
    ],
)
def test_the_choice_is_within_a_tenth_of_the_better_side(name: str) -> None:
    """Guards against a choice that is worse than none: by what it believes, by what it tries, or by
    what it does to others."""
    remote, always, chosen = (arm(RATES[name], w) for w in ("remote", "always", "chosen"))
    assert chosen[0] <= A_TENTH * min(remote[0], always[0]), (remote, always, chosen)
    assert A_TENTH * chosen[1] >= max(remote[1], always[1]), (remote, always, chosen)


@pytest.mark.parametrize(
    "world", [World(), World(spikes=0.05), World(answering=0.04)], ids=["", "spikes", "answering"]
)
def test_where_decode_is_the_bottleneck(world: World) -> None:
    """Guards against the worse of both. Six talks without a pause keep decode busy all the time:
    one side has the shorter TTFT, the other more turns a second, and no choice has both; this one
    has the first, and more turns a second than a server that computes them all."""
    remote, always, chosen = (arm(world, where) for where in ("remote", "always", "chosen"))
    assert always[0] < remote[0] and always[1] < remote[1]
    assert chosen[0] <= A_TENTH * always[0] and chosen[1] >= always[1], (remote, always, chosen)
