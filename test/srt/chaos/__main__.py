"""``python -m chaos``: two servers under seeded faults, and every request accounted for.

Exits with status 1 if a request was lost, answered wrong or failed without a cause, if memory
leaked, or if a log shows an error. ``--seed`` repeats the plan of a run, but not the timing of the
servers.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmark.harness.models import REPOSITORY
from benchmark.harness.process import ServerFailed
from chaos.arms import BACKENDS, WHOLE, make_arms
from chaos.bank import ask_aggregated
from chaos.families import DENSE, FAMILIES, make_model
from chaos.plan import CURRENT_EVERY_S, HEAVY_EVERY_S, make_plans
from chaos.report import print_account, print_plan, print_summary
from chaos.run import run_arm
from current.environment import RELEASE, environment
from sglang.srt.patchset.status import installed_version


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m chaos", description=__doc__)
    parser.add_argument(
        "--seconds", type=float, default=600.0, help="duration of the faults, over all arms"
    )
    parser.add_argument("--seed", type=int, help="default: a new one, printed")
    parser.add_argument("--backend", choices=[*BACKENDS, "both"], default="both")
    parser.add_argument("--page-size", choices=["1", "16", "64", "both"], default="both")
    parser.add_argument(
        "--plain", action="store_true", help="pairs with decode's radix cache alone"
    )
    parser.add_argument(
        "--whole",
        action="store_true",
        help="--hicache-buffer-only and --local-turns together; decode writes to the store too, "
        "and both servers get new weights",
    )
    parser.add_argument(
        "--hicache-buffer-only",
        action="store_true",
        help="a stage and a Mooncake store behind prefill's tree; page sizes 16 and 64",
    )
    parser.add_argument(
        "--local-turns",
        action="store_true",
        help="decode computes short turns itself, and is flushed and paused too",
    )
    parser.add_argument(
        "--family",
        choices=FAMILIES,
        default="",
        help="serve a family of models instead of the dense one; by default on plain pairs",
    )
    current = parser.add_mutually_exclusive_group()
    current.add_argument(
        "--lead",
        action="store_const",
        const="lead",
        dest="current",
        default="",
        help=f"SGLang {RELEASE} with all parts of the group `lead`, under its interpreter",
    )
    current.add_argument(
        "--stock",
        action="store_const",
        const="stock",
        dest="current",
        help="that release without the group",
    )
    parser.add_argument("--out", type=Path, help="the event log; server logs go beside it")
    args = parser.parse_args(arguments)
    if bool(args.current) != (installed_version() == RELEASE):
        parser.error(f"SGLang {RELEASE} requires --lead or --stock, and no other release has them")
    if args.current:
        if args.hicache_buffer_only or args.local_turns or args.whole or args.family:
            parser.error(
                f"SGLang {RELEASE} has no arm with a store, turns that decode computes, or families"
            )
        os.environ.update(environment())
    parts: dict[str, Any] | None = {
        "staged": args.hicache_buffer_only,
        "local": args.local_turns,
        "current": args.current,
    }
    if args.whole:
        parts = WHOLE
    elif not (args.plain or any(parts.values())):
        parts = None
    arms = make_arms(args.backend, args.page_size, parts, args.family)
    seed = random.SystemRandom().randrange(10**6) if args.seed is None else args.seed
    out = args.out or REPOSITORY / "out" / "chaos" / f"{seed}" / "events.jsonl"
    served = FAMILIES.get(args.family, DENSE)
    every_s = CURRENT_EVERY_S if args.current or args.family else HEAVY_EVERY_S
    console = Console()
    began = time.monotonic()
    models = [make_model(out.parent / "model", args.family)]
    if any(arm.whole for arm in arms):
        models.append(make_model(out.parent / "other", args.family, seed=1))
    console.print(
        f"seed {seed}; logs in {out.parent}; querying an aggregated server for the right answers",
        soft_wrap=True,
    )
    try:
        banks = ask_aggregated(models, out.parent, seed, served)
        seconds = args.seconds / len(arms)
        faults = [arm.faults for arm in arms]
        plans = make_plans(seed, faults, seconds, banks[0].threads, every_s)
        out.unlink(missing_ok=True)
        show = partial(console.print, style="dim", highlight=False)
        accounts = []
        for arm, plan in zip(arms, plans, strict=True):
            print_plan(console, arm, plan)
            account = run_arm(arm, plan, banks, out.parent / arm.name, out, show)
            print_account(console, arm, account)
            accounts.append((arm, account))
    except ServerFailed as failure:
        console.print(f"{failure}", style="red", highlight=False, markup=False)
        return 1
    total = print_summary(console, accounts)
    verdict = "clean" if total.clean else "NOT CLEAN"
    console.print(f"{verdict} in {time.monotonic() - began:.0f} s; seed {seed}", highlight=False)
    return 0 if total.clean else 1


if __name__ == "__main__":
    sys.exit(main())
