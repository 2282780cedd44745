"""A short chaos run: every kind of fault and abort, on servers with full pools."""

from __future__ import annotations

from pathlib import Path

import pytest

from chaos.arms import Arm
from chaos.bank import make_bank
from chaos.plan import HEAVY, FaultKind, Faults, make_plans
from chaos.report import one_line
from chaos.run import run_arm
from e2e.support import Reference

SEED = 1
SECONDS = 24.0
"""Duration for each kind of server fault."""
ARMS = {
    # The fault that no other end-to-end test of every run has.
    Arm("nixl", 16): (FaultKind.KILL_DECODE,),
    Arm("mooncake", 1): (
        FaultKind.KILL_PREFILL,
        FaultKind.STOP_PREFILL,
        FaultKind.STOP_PREFILL_SCHEDULER,
    ),
}


@pytest.mark.hazard("pages-written-after-release", "abort-leaves-something")
@pytest.mark.parametrize(
    "arm",
    [
        pytest.param(arm, id=arm.name, marks=[pytest.mark.nightly] * (arm.backend == "mooncake"))
        for arm in ARMS
    ],
)
def test_every_request_is_accounted_for(
    model: Path, reference: Reference, logs: Path, arm: Arm
) -> None:
    """Guards against lost, wrong and unexplained answers, leaks, and errors in logs. Requests that
    are running, queued, retracted, held and just announced all meet killed and stopped servers,
    disconnects and aborts. Each must get the right tokens, end because it was aborted, or fail with
    an error that names a cause. The two arms share out the kinds of faults; ``test_faults.py`` has
    those of the second arm in every run, and ``make chaos`` runs for longer."""
    bank = make_bank(model, SEED, reference.server.generate)
    faults, seconds = Faults(ARMS[arm]), SECONDS * len(ARMS[arm])
    (plan,) = make_plans(SEED, [faults], seconds, bank.threads)
    account = run_arm(arm, plan, [bank], logs, logs / "events.jsonl")
    print(one_line(account.tally))
    bugs = [f"request {life.rid}: {verdict}" for life, verdict in account.bugs]
    assert account.tally.clean, "\n".join([one_line(account.tally), *bugs, *account.tally.problems])
    done = {kind for kind in HEAVY if account.tally.faults[kind.value]}
    assert done == set(ARMS[arm])
    assert account.tally.restarts >= sum(
        fault.kind in (FaultKind.KILL_PREFILL, FaultKind.KILL_DECODE) for fault in plan.faults
    )
