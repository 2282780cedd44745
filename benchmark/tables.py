"""``python -m benchmark.tables``: writes the tables of the READMEs and of the docs.

A table stands between ``<!-- table:NAME -->`` and ``<!-- end -->``. Its numbers are those of the
files that the benchmark's command left in its ``results/`` folder, the command is above it, and a
test compares them, so that no table says what no run showed. Tables of environment variables are
made from ``sglang.srt.patchset.environment``, those of replaced classes from its table and sources,
those of refused settings from its rules, those of models from the parameters of the tests.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmark import model_matrix, replaced
from benchmark.admission import page as admission_page
from benchmark.agentic.report import page as pages
from benchmark.agentic.studies.spec import FOLDER
from benchmark.harness.models import REPOSITORY
from benchmark.harness.report import markdown
from benchmark.kv_transfer import page as transfer_page
from sglang.srt.disaggregation.lead import settings
from sglang.srt.patchset import environment, flags, refusals
from sglang.srt.patchset.table import GROUPS

_TABLE = re.compile(r"(<!-- table:([a-z-]+) -->\n).*?(<!-- end -->)", re.DOTALL)

Json = Mapping[str, Any]


# ---- studies ----

RESULTS = FOLDER / "results"
_FIGURES = "RESULTS"
"""Stands for their folder, whose path differs by page."""


def measured() -> list[str]:
    """Studies with a committed result."""
    return sorted(path.parent.name for path in RESULTS.glob("*/summary.json"))


def study(name: str) -> str:
    """benchmark/agentic/studies: what a study showed; tables of several loads are on its page."""
    told = _told(name)
    figures = [path.name for path in sorted((RESULTS / name).glob("*.svg"))]
    shown = [f"![{told['study']['title']}]({_FIGURES}/{name}/{figure})" for figure in figures]
    where = (
        f"{told['date']}, {told['machine']}, commit {told['commit']}, by\n`{told['command']}`; "
        f"all numbers are on [its page]({_FIGURES}/{name}/page.md)."
    )
    if len(told["loads"]) == 1:
        shown = [pages.results(told).rstrip(), pages.counters(told).rstrip(), *shown]
    return "\n\n".join(filter(None, [told["answer"], where, *shown])) + "\n"


#: Of these studies README.md shows this load, one in the middle, and these arms.
GAINS = {
    "throughput": ("8", ("patched", "radix")),
    "worth": ("8", ("pd-stock", "pd-patched", "pd-radix", "pd-local")),
    "break_even": ("6, cold_share 0.1, turn_tokens 128", ("pd-radix", "pd-local")),
}


def gains() -> str:
    """README.md: arms of three studies over the first one."""
    rows = [row for name, shown in GAINS.items() for row in _gained(name, *shown)]
    return (
        "Ratios of two arms, on two cores. Less is better, but for goodput. Bold: the interval "
        "excludes 1. A dash: an arm had no goodput in some round. *Goodput*: requests a second "
        "within the limits of TTFT and TPOT. *Radix*: the decode radix cache.\n\n"
    ) + markdown(["study", "arms", "sessions at once", *pages.GAINED.values()], rows)


def _gained(name: str, load: str, arms: Sequence[str]) -> list[list[str]]:
    told = _told(name)
    of = told["loads"][load]
    base, page = next(iter(told["titles"].values())), f"[{name}]({_FIGURES}/{name}/page.md)"
    return [[page, f"{told['titles'][arm]} / {base}", load, *pages.gained(of[arm])] for arm in arms]


def whole() -> str:
    """docs/advanced_features/pd_whole_system.md: what each part adds."""
    return "\n".join(_added(name) for name in ("whole", "whole_answers"))


def _added(name: str) -> str:
    told = _told(name)
    where = f"[{name}]({_FIGURES}/{name}/page.md), {told['date']}, {told['machine']}"
    return f"{where}, commit {told['commit']}:\n\n{pages.whole(told)}"


def claims() -> str:
    """benchmark/agentic/studies: the claims of these studies, and what was measured."""
    rows = [[name, *row] for name in measured() for row in pages.claim_rows(_told(name)["claims"])]
    return markdown(["study", *pages.CLAIMS], rows)


def _told(name: str) -> Any:
    """The committed summary of a study."""
    return json.loads((RESULTS / name / "summary.json").read_text())


# ---- KV transfer ----


def progress_delay() -> str:
    """docs/upstream.md: what a pause of NIXL's progress thread is worth."""
    idle = transfer_page.by_arm("idle", "{idle_share_of_a_core[native threads]:.1%}")
    return (
        f"NIXL's threads of an idle prefill process take {idle['stock']} of a core without the "
        f"pause and {idle['ours']} with it.\n"
    )


# ---- files ----


def variables(group: str) -> str:
    """docs/: the environment variables of a group."""
    return f"{environment.GROUPS[group]}:\n\n{environment.table(group)}"


def refused() -> str:
    """README.md: what is refused with each flag."""
    (fp4,) = refusals.FP4
    features = (flags.FLAG, flags.LOCAL, flags.ON)
    lines = [f"- with `{flag}`: {'; '.join(_refused(flag))}" for flag in features]
    intro = (
        "Refused at start, with an error that names both settings (on both servers of a pair: "
        f"`{fp4}`):"
    )
    return "\n".join([intro, *lines]) + "\n"


def refused_with(flag: str) -> str:
    """docs/: what is refused with a flag, and why."""
    return markdown(["refused", "why"], [[*each] for each in _refused(flag).items()])


def refused_by(rows: Mapping[str, str]) -> str:
    """Return the table of settings that the group ``lead`` refuses, one row a reason."""
    whys: dict[str, list[str]] = {}
    for setting, why in rows.items():
        whys.setdefault(why, []).append(_code(setting))
    return markdown(["setting", "why"], [["; ".join(of), _code(why)] for why, of in whys.items()])


def _refused(flag: str) -> dict[str, str]:
    """The settings, as they are written, each with the reason."""
    rows = (*refusals.AS_GIVEN, *refusals.ALWAYS, *refusals.MODELS, *refusals.DRAFTED)
    return {_code(row.other): _code(row.why) for row in rows if flag in row.flags}


def _code(text: str) -> str:
    """Flags, with their value, and variables as code."""
    return re.sub(r"(--[\w-]+(?: \w+$)?|SGLANG_\w+(?:=1)?)", r"`\1`", text)


TABLES: Mapping[str, Callable[[], str]] = {
    "gains": gains,
    "claims": claims,
    **{f"study-{n.replace('_', '-')}": partial(study, n) for n in measured()},
    "whole": whole,
    "admission": admission_page.table,
    "admission-writes": admission_page.writes,
    "transfer": transfer_page.transfer,
    "transfer-bounds": transfer_page.bounds,
    "transfer-pauses": transfer_page.pauses,
    "progress-delay": progress_delay,
    "models": model_matrix.here,
    "models-setups": model_matrix.setups,
    "models-current": model_matrix.there,
    "models-refused": model_matrix.reasons,
    "models-tests": model_matrix.tests,
    "models-short": model_matrix.short,
    "refused": refused,
    "refused-radix": partial(refused_with, flags.FLAG),
    "refused-turns": partial(refused_with, flags.LOCAL),
    "refused-buffer": partial(refused_with, flags.ON),
    "refused-lead-both": partial(refused_by, settings.ON_BOTH),
    "refused-lead-decode": partial(refused_by, settings.ON_DECODE),
    **{f"variables-{group}": partial(variables, group) for group in environment.GROUPS},
    **{f"replaced-{g.name.replace('_', '-')}": partial(replaced.table, g.name) for g in GROUPS},
}

FILES = tuple(
    path
    for folder in (REPOSITORY, REPOSITORY / "benchmark", REPOSITORY / "docs")
    for path in sorted(folder.glob("*.md" if folder == REPOSITORY else "**/*.md"))
    if "<!-- table:" in path.read_text()
)


def render(text: str, folder: Path) -> str:
    """``text``, of a page in ``folder``, with every table in it as the results have it.

    Raises:
        KeyError: a table that nobody makes.
    """
    made = _TABLE.sub(lambda found: f"{found[1]}{TABLES[found[2]]()}{found[3]}", text)
    return made.replace(f"({_FIGURES}/", f"({os.path.relpath(RESULTS, folder)}/")


def main() -> int:
    """Rewrites what has changed, and names it."""
    argparse.ArgumentParser(prog="python -m benchmark tables", description=__doc__).parse_args()
    for path in FILES:
        before = path.read_text()
        if (after := render(before, path.parent)) != before:
            path.write_text(after)
            print(path.relative_to(REPOSITORY))
    return 0


if __name__ == "__main__":
    sys.exit(main())
