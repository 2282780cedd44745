"""The output of a chaos run: the plan before, the counts afterwards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from chaos.arms import Arm
from chaos.plan import Plan
from chaos.run import Account
from chaos.tally import EMPTY, Outcome, Tally

SHOWN_BUGS = 10


def print_plan(console: Console, arm: Arm, plan: Plan) -> None:
    """Print the number of the arm's requests in one line, then its faults with their times."""
    leaves = Counter(send.leave.how.value for send in plan.sends if send.leave)
    line = ", ".join(f"{count} {how}" for how, count in sorted(leaves.items()))
    console.print(
        f"{arm.name}: seed {plan.seed}, arm {plan.arm}, {plan.seconds:.0f} s, "
        f"{len(plan.sends)} requests ({line})",
        highlight=False,
    )
    for fault in plan.faults:
        length = f" for {fault.for_s:.1f} s" if fault.for_s else ""
        console.print(f"  {fault.at:6.1f} s  {fault.kind.value}{length}", highlight=False)


def print_account(console: Console, arm: Arm, account: Account) -> None:
    """Print the bugs of one arm, if any."""
    for life, verdict in account.bugs[:SHOWN_BUGS]:
        console.print(
            f"{arm.name}: request {life.rid} (room {life.room}) is {verdict.outcome.value}: "
            f"{verdict.reason[:600]}",
            style="red", highlight=False, markup=False,
        )  # fmt: skip
    if len(account.bugs) > SHOWN_BUGS:
        console.print(f"{arm.name}: and {len(account.bugs) - SHOWN_BUGS} more", style="red")
    for problem in account.tally.problems:
        console.print(f"{arm.name}: {problem}", style="red", highlight=False, markup=False)


def print_summary(console: Console, accounts: Sequence[tuple[Arm, Account]]) -> Tally:
    """Print the table of all arms and return their sum."""
    total = sum((account.tally for _, account in accounts), EMPTY)
    table = Table()
    table.add_column("")
    tallies = [account.tally for _, account in accounts]
    for arm, _ in accounts:
        table.add_column(arm.name, justify="right")
    if len(accounts) > 1:
        table.add_column("all", justify="right")
        tallies.append(total)
    table.add_row("requests", *(str(tally.requests) for tally in tallies))
    for outcome in Outcome:
        table.add_row(outcome.value, *(str(tally.outcomes[outcome]) for tally in tallies))
    table.add_row("leaked tokens", *(str(tally.leaked_tokens) for tally in tallies))
    table.add_row("other problems", *(str(len(tally.problems)) for tally in tallies))
    table.add_section()
    for kind in sorted(total.faults):
        table.add_row(kind, *(str(tally.faults[kind]) for tally in tallies))
    table.add_row("restarts", *(str(tally.restarts) for tally in tallies))
    console.print(table)
    for arm, account in accounts:
        console.print(
            f"{arm.name}: the slowest failure came {account.slowest_failure_s:.1f} s after its "
            f"request, the slowest abort took {account.slowest_abort_s:.1f} s",
            highlight=False,
        )
    console.print(one_line(total), highlight=False)
    return total


def one_line(tally: Tally) -> str:
    """Return the counts of all outcomes for a log."""
    counts = ", ".join(f"{outcome.value}: {tally.outcomes[outcome]}" for outcome in Outcome)
    return (
        f"requests: {tally.requests}, {counts}, leaked: {tally.leaked_tokens}, "
        f"restarts: {tally.restarts}, other problems: {len(tally.problems)}"
    )
