"""``python -m benchmark.tables``: write the generated tables of the READMEs and the docs.

A table is between ``<!-- table:NAME -->`` and ``<!-- end -->``. Its numbers are those of the files
in a benchmark's ``results/`` folder, and the command is above it. A test compares them, so that no
table shows a number that no run measured. Tables of environment variables come from
``sglang.srt.patchset.environment``, those of replaced classes from its table and the sources, those
of refused settings from its rules, those of models from the parameters of the tests.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import textwrap
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from benchmark import model_matrix, replaced, worth_it
from benchmark.admission import page as admission_page
from benchmark.agentic.report import page as pages
from benchmark.agentic.report.verdict import share
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
"""Placeholder for their folder, whose relative path depends on the page."""


def measured() -> list[str]:
    """Return the names of studies with a committed result."""
    return sorted(path.parent.name for path in RESULTS.glob("*/summary.json"))


def study(name: str) -> str:
    """Return a study's result for benchmark/agentic/studies; its page has several loads' tables."""
    summary = _summary(name)
    figures = [path.name for path in sorted((RESULTS / name).glob("*.svg"))]
    parts = [f"![{summary['study']['title']}]({_FIGURES}/{name}/{figure})" for figure in figures]
    origin = (
        f"{summary['date']}, {summary['machine']}, commit {summary['commit']}, by\n"
        f"`{summary['command']}`; all numbers are on [its page]({_FIGURES}/{name}/page.md)."
    )
    if len(summary["loads"]) == 1:
        parts = [pages.results(summary).rstrip(), pages.counters(summary).rstrip(), *parts]
    return "\n\n".join(filter(None, [summary["answer"], origin, *parts])) + "\n"


#: Load of README.md's table, in the middle of those of ``throughput``.
SHOWN_LOAD = "8"


def gains() -> str:
    """Return README.md's first table: a pair with and without the package."""
    summary = _summary("throughput")
    numbers = [summary["loads"][SHOWN_LOAD][arm]["numbers"] for arm in summary["titles"]]
    rows = [[column.head, *(column.shown(shown) for shown in numbers)] for column in pages.SHORT]
    header = [f"{SHOWN_LOAD} requests at a time", *summary["titles"].values()]
    return f"{markdown(header, rows)}\n{_origin('throughput')}\n"


#: Ratios of README.md: what is compared, the study, and the place among its claims.
TRADES = (
    ("two shared prefixes: the flag over stock, polling in both, requests/s", "throughput", 2),
    ("the same prompts: the flag over the package without it, ITL p99", "throughput", 1),
    ("an agentic trace on full pools: the flag over stock, time of a request", "worth", 1),
    ("the same trace: the flag over the package without it, time of a request", "worth", 2),
    (
        "the same trace: a pair without the flag over two aggregated servers, time of a request",
        "worth",
        0,
    ),
)


def trades() -> str:
    """Return README.md's ratios, better and worse ones."""
    rows = []
    for change, name, index in TRADES:
        claim = _summary(name)["claims"][index]
        page = f"[{name}]({_FIGURES}/{name}/page.md)"
        rows.append([change, claim["load"], share(pages.three(claim["ours"])), page])
    return markdown(["ratio of two arms", "sessions at once", "ratio", "study"], rows)


def _origin(name: str) -> str:
    """Return where the numbers of a study come from."""
    summary = _summary(name)
    return (
        f"{summary['machine']}, {summary['date']}, commit {summary['commit']}, "
        f"`{summary['command']}`: [all loads, with intervals]({_FIGURES}/{name}/page.md)."
    )


def whole() -> str:
    """Return the gain of each part, for docs/advanced_features/pd_whole_system.md."""
    return "\n".join(_added(name) for name in ("whole", "whole_answers"))


def _added(name: str) -> str:
    summary = _summary(name)
    origin = f"[{name}]({_FIGURES}/{name}/page.md), {summary['date']}, {summary['machine']}"
    return f"{origin}, commit {summary['commit']}:\n\n{pages.whole(summary)}"


def claims() -> str:
    """Return the studies' claims beside the measurements, for benchmark/agentic/studies."""
    rows = [
        [name, *row] for name in measured() for row in pages.claim_rows(_summary(name)["claims"])
    ]
    return markdown(["study", *pages.CLAIMS], rows)


def _summary(name: str) -> Any:
    """Return the committed summary of a study."""
    return json.loads((RESULTS / name / "summary.json").read_text())


#: Arguments of the example in docs/operations/sizing.md.
WORTH_IT = (
    "--model Qwen/Qwen3-32B --tp 2 --pool-gib 30 --prefix 8000 --prefixes 4 --new 600 --answer 300 "
    "--turns 10 --sessions 40 --network-gb-s 50 --prefill-tokens-per-s 12000 --decode-step-ms 25 "
    "--itl-ms 60 --prefill-servers 2 --decode-servers 2"
)


def worth_it_example() -> str:
    """Return the output of ``worth-it`` for an example, for docs/operations/sizing.md."""
    lines = textwrap.wrap(WORTH_IT, 96, break_on_hyphens=False)
    command = " \\\n    ".join(["python -m benchmark worth-it", *lines])
    return f"```bash\n{command}\n```\n\n{worth_it.page(WORTH_IT.split())}"


# ---- KV transfer ----


def progress_delay() -> str:
    """Return the gain of a pause of NIXL's progress thread, for docs/upstream.md."""
    idle = transfer_page.by_arm("idle", "{idle_share_of_a_core[native threads]:.1%}")
    return (
        f"NIXL's threads of an idle prefill process take {idle['stock']} of a core without the "
        f"pause and {idle['ours']} with it.\n"
    )


# ---- files ----


def variables(group: str) -> str:
    """Return the environment variables of a group, for docs/."""
    return f"{environment.VARIABLE_GROUPS[group]}:\n\n{environment.table(group)}"


def refused_with(flag: str) -> str:
    """Return the settings that are refused with a flag, and the reasons, for docs/."""
    return markdown(["refused", "why"], [[*row] for row in _refused(flag).items()])


def refused_by(rows: Mapping[str, str]) -> str:
    """Return the table of settings that the group ``lead`` refuses, one row a reason."""
    whys: dict[str, list[str]] = {}
    for setting, why in rows.items():
        whys.setdefault(why, []).append(_code(setting))
    return markdown(
        ["setting", "why"], [["; ".join(names), _code(why)] for why, names in whys.items()]
    )


def _refused(flag: str) -> dict[str, str]:
    """Return setting, as it is written -> reason."""
    rows = (*refusals.AS_GIVEN, *refusals.ALWAYS, *refusals.MODELS, *refusals.DRAFTED)
    return {_code(row.other): _code(row.why) for row in rows if flag in row.flags}


def _code(text: str) -> str:
    """Return the text with flags, their values, and variables as code."""
    return re.sub(r"(--[\w-]+(?: \w+$)?|SGLANG_\w+(?:=1)?)", r"`\1`", text)


TABLES: Mapping[str, Callable[[], str]] = {
    "gains": gains,
    "trades": trades,
    "worth-it": worth_it_example,
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
    "refused-radix": partial(refused_with, flags.FLAG),
    "refused-turns": partial(refused_with, flags.LOCAL),
    "refused-buffer": partial(refused_with, flags.ON),
    "refused-lead-both": partial(refused_by, settings.ON_BOTH),
    "refused-lead-decode": partial(refused_by, settings.ON_DECODE),
    **{f"variables-{group}": partial(variables, group) for group in environment.VARIABLE_GROUPS},
    **{f"replaced-{g.name.replace('_', '-')}": partial(replaced.table, g.name) for g in GROUPS},
}

FILES = tuple(
    path
    for folder in (REPOSITORY, REPOSITORY / "benchmark", REPOSITORY / "docs")
    for path in sorted(folder.glob("*.md" if folder == REPOSITORY else "**/*.md"))
    if "<!-- table:" in path.read_text()
)


def render(text: str, folder: Path) -> str:
    """Return ``text``, a page in ``folder``, with every table rendered from the results.

    Raises:
        KeyError: an unknown table.
    """
    rendered = _TABLE.sub(lambda match: f"{match[1]}{TABLES[match[2]]()}{match[3]}", text)
    return rendered.replace(f"({_FIGURES}/", f"({os.path.relpath(RESULTS, folder)}/")


def main() -> int:
    """Rewrite the changed pages, and print their names."""
    argparse.ArgumentParser(prog="python -m benchmark tables", description=__doc__).parse_args()
    for path in FILES:
        before = path.read_text()
        if (after := render(before, path.parent)) != before:
            path.write_text(after)
            print(path.relative_to(REPOSITORY))
    return 0


if __name__ == "__main__":
    sys.exit(main())
