"""``python -m benchmark.tables``: writes the tables of the READMEs and of the docs.

A table stands between ``<!-- table:NAME -->`` and ``<!-- end -->``. Its numbers are those of the
files that the benchmark's command left in its ``results/`` folder, the command is above it, and a
test compares them, so that no table says what no run showed. Tables of environment variables are
made from ``sglang.srt.patchset.environment``, those of replaced classes from its table and sources,
those of refused settings from its rules.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmark import replaced
from benchmark.admission import page as admission_page
from benchmark.decode_radix_cache import page as radix_page
from benchmark.harness.models import REPOSITORY
from benchmark.harness.report import markdown
from benchmark.hicache_buffer_only import page as hicache_page
from benchmark.kv_transfer import page as transfer_page
from benchmark.lead import page as lead_page
from benchmark.lead.measure import read as lead_rows
from benchmark.local_turns import page as local_page
from sglang.srt.patchset import environment, flags, refusals
from sglang.srt.patchset.table import GROUPS

_BENCHMARK = Path(__file__).parent
_TABLE = re.compile(r"(<!-- table:([a-z-]+) -->\n).*?(<!-- end -->)", re.DOTALL)

Json = Mapping[str, Any]
Cell = Callable[[Json], str]


def made(summary: Json, command: str) -> str:
    """The line above a table: when, where, by which command."""
    commit = summary["commit"]
    return f"{summary['date']}, {summary['machine']}, commit {commit}, by\n`{command}`:\n\n"


# ---- decode radix cache ----

_RADIX = _BENCHMARK / "decode_radix_cache" / "results"
_LOCAL_TURNS = _BENCHMARK / "local_turns" / "results"
_STUDIES = _BENCHMARK / "agentic" / "studies" / "results"


def worth() -> str:
    """benchmark/README.md: a load a row and an arm a column."""
    radix, wire = (_read(_RADIX / f"{name}.summary.json") for name in ("throughput", "wire"))
    burst, load = radix_page.medians(radix), radix["load"]
    local, quiet = (_read(_LOCAL_TURNS / f"{name}.json") for name in ("summary", "quiet"))
    clients = max(local["load"]["cold_clients"])
    sessions = f"{local['load']['talks']} sessions"
    of = {name: _read(_STUDIES / name / "summary.json") for name in ("worth", "prefill_events")}
    rows = [
        [
            f"{load['requests']} requests at once over {load['groups']} prefixes: requests/s",
            *(radix_page.rate(burst[arm]) for arm in ("stock", "flag")),
            "-",
            "-",
        ],
        _sessions(f"{sessions} alone", local, 0),
        _sessions(f"{sessions} beside {clients} clients with cold prompts", local, clients),
        *(
            _against_aggregated(f"{many} agentic sessions", arms)
            for many, arms in of["worth"]["loads"].items()
        ),
        *(
            _against_aggregated(f"{many} agentic sessions beside a client with cold prompts", arms)
            for many, arms in of["prefill_events"]["loads"].items()
        ),
    ]
    head = ["load", "PD, stock", "PD, radix cache", "and local turns", "two aggregated"]
    alone, busy = local_page.medians(quiet, 0), local_page.medians(local, clients)
    again = [_cell(alone[arm]) for arm in (local_page.REMOTE, local_page.CHOSEN)]
    cold = [f"{arm['cold_tokens_per_s']:,.0f}" for arm in busy.values()]
    moved = [radix_page.moved(burst[name]) for name in ("stock", "flag")]
    on_tcp = [_megabytes(wire["arms"][name]["carried"]) for name in ("stock", "flag")]
    same = radix["outputs_identical"] and local["outputs_identical"]
    return (
        f"{markdown(head, rows)}\n"
        f"- First row: {len(radix['runs']['flag'])} rounds, no interval. KV moved: {moved[0]} "
        f"stock, {moved[1]} with the flag. Another load over TCP, as the kernel counts it: "
        f"{on_tcp[0]} and {on_tcp[1]}.{attribution(burst)}"
        f"- Second and third row: {local['rounds']} rounds, no interval. Numbers are requests/s of "
        "the sessions; TTFT of later turns, p50 and p99; end-to-end p50.\n"
        f"- Second row again, {quiet['rounds']} rounds: {again[0]} with the radix cache, "
        f"{again[1]} with local turns.\n"
        f"- Third row: cold prompts answered, in tokens/s: {', '.join(cold)} "
        f"({', '.join(busy)}).\n"
        "- SGLang's router holds the answer to a remote turn back until prefill's half has ended. "
        "TTFT contains that wait, end-to-end time does not.\n"
        "- Other rows: mean end-to-end time divided by that of two aggregated servers, with 95 % "
        "intervals. Below 1, PD is faster. An interval that contains 1 is no verdict.\n"
        f"- Measured on {of['prefill_events']['date']} to {of['worth']['date']}. Outputs of the "
        f"first three rows are {'identical' if same else 'NOT identical'} in all arms.\n"
    )


def gains() -> str:
    """README.md: the three rows of ``worth`` that say the most."""
    burst = radix_page.medians(_read(_RADIX / "throughput.summary.json"))
    local = _read(_LOCAL_TURNS / "summary.json")
    clients = max(local["load"]["cold_clients"])
    alone, busy = (local_page.medians(local, beside) for beside in (0, clients))
    remote, chosen, both = local_page.REMOTE, local_page.CHOSEN, local_page.AGGREGATED
    study = _read(_STUDIES / "worth" / "summary.json")["loads"].items()
    ratios = (
        f"{many} at once "
        + ", ".join(_ratio(arms[arm]) for arm in ("pd-stock", "pd-radix", "pd-local"))
        for many, arms in study
    )
    cold = [f"{busy[arm]['cold_tokens_per_s']:,.0f}" for arm in (chosen, both)]
    rates = [radix_page.rate(burst[arm]) for arm in ("stock", "patched", "flag")]
    moved = [radix_page.moved(burst[name]) for name in ("stock", "flag")]
    return (
        f"- **Radix cache**, a burst over two long prefixes: {rates[0]} requests/s stock, "
        f"{rates[1]} with the package and no flag, {rates[2]} with the flag. KV moved: {moved[0]} "
        f"stock, {moved[1]} with the flag.\n"
        f"- **Local turns**, requests/s and end-to-end p50 of sessions beside {clients} clients "
        f"with cold prompts: {_rate_and_time(busy[remote])} with the radix cache, "
        f"{_rate_and_time(busy[chosen])} with local turns too, {_rate_and_time(busy[both])} on two "
        f"aggregated servers, which answer more of the cold prompts ({cold[1]} tokens/s, not "
        f"{cold[0]}). Sessions alone: {_rate_and_time(alone[remote])}, "
        f"{_rate_and_time(alone[chosen])} and {_rate_and_time(alone[both])}.\n"
        "- **Agentic sessions**, mean end-to-end time of stock PD, with the radix cache, and with "
        f"local turns too, divided by that of two aggregated servers: {'; '.join(ratios)}. "
        "Above 1, PD is slower. An interval that contains 1 is no verdict.\n"
    )


def _rate_and_time(run: Json) -> str:
    return f"{run['requests_per_s']:.2f} and {run['latency_s']['p50'] * 1e3:,.0f} ms"


def _cell(run: Json) -> str:
    ttft = run["ttft_later_s"]
    return (
        f"{run['requests_per_s']:.2f}; {ttft['p50'] * 1e3:,.0f}, {ttft['p99'] * 1e3:,.0f}; "
        f"{run['latency_s']['p50'] * 1e3:,.0f} ms"
    )


def _sessions(name: str, summary: Json, clients: int) -> list[str]:
    arms = local_page.medians(summary, clients)
    order = (local_page.STOCK, local_page.REMOTE, local_page.CHOSEN, local_page.AGGREGATED)
    return [name, *(_cell(arms[arm]) for arm in order)]


def _against_aggregated(name: str, arms: Json) -> list[str]:
    order = ("pd-stock", "pd-radix", "pd-local")
    return [name, *(_ratio(arms[arm]) if arm in arms else "-" for arm in order), "1"]


def _ratio(arm: Json) -> str:
    value, low, high = arm["of_first_arm"]["e2e"]["mean"]
    return f"{value:.2f} [{low:.2f}, {high:.2f}]"


def attribution(medians: Mapping[str, Json]) -> str:
    """Which part of the requests/s is the flag's and which is not, as far as arms were measured."""
    rates = {name: run["summary"]["requests_per_s"] for name, run in medians.items()}
    if "patched" not in rates:
        return (
            " This run has no arm without the flag: it shows the flag and NIXL's sleeping progress "
            "thread together.\n"
        )
    said = (
        f" Without a flag the package gives {rates['patched'] / rates['stock']:.2f} times "
        f"stock's requests/s, and the flag {rates['flag'] / rates['patched']:.2f} times that."
    )
    if "flag, spinning" in rates:
        said += (
            " NIXL's progress thread busy-polls in stock and sleeps here. With the flag, sleeping "
            f"gives {rates['flag'] / rates['flag, spinning']:.2f} times as many requests/s. If it "
            "busy-polls here too, at a lower priority on prefill than in stock, the flag gives "
            f"{rates['flag, spinning'] / rates['stock']:.2f} times stock's."
        )
    return f"{said}\n"


def throughput() -> str:
    """benchmark/decode_radix_cache: everything of the throughput run."""
    summary = _read(_RADIX / "throughput.summary.json")
    same = "Outputs are identical in all arms" if summary["outputs_identical"] else "Outputs DIFFER"
    command = f"python -m benchmark.decode_radix_cache throughput{_radix_options(summary['runs'])}"
    return f"{made(summary, command)}{markdown(*radix_page.throughput(summary))}\n{same}.\n"


def _radix_options(runs: Mapping[str, Sequence[Json]]) -> str:
    repeats = len(runs["stock"])
    spinning = " --spinning" if "flag, spinning" in runs else ""
    return (f" --repeats {repeats}" if repeats > 1 else "") + spinning


def wire() -> str:
    """benchmark/decode_radix_cache: bytes as the kernel counts them."""
    summary = _read(_RADIX / "wire.summary.json")
    command = "python -m benchmark.decode_radix_cache wire"
    return made(summary, command) + markdown(*radix_page.wire(summary))


def speculation() -> str:
    """docs/: hits, bytes and accept lengths with a draft model; drafts accepted on hits."""
    summary = _read(_RADIX / "speculation.summary.json")
    same = "the same" if summary["outputs_identical"] else "NOT the same"
    command = "python -m benchmark.decode_radix_cache speculation"
    return (
        f"{made(summary, command)}{markdown(*radix_page.speculation(summary))}\nBoth answer "
        f"{same}. Drafts accepted with one step, of prompts with equal answers:\n\n"
        f"{markdown(*radix_page.accepted(summary))}"
    )


# ---- the demo ----


def demo() -> str:
    """benchmark/demo: what ``make demo`` printed."""
    results = _BENCHMARK / "demo" / "results"
    summary = _read(results / "demo.summary.json")
    lines = (results / "demo.txt").read_text().strip().splitlines()
    text = "\n".join(line.rstrip() for line in lines)
    note = f"; {summary['note']}" if "note" in summary else ""
    return (
        f"`make demo` took {summary['seconds']:.0f} s after the installation and ended with this "
        f"table\n({summary['machine']}, {summary['date']}, commit {summary['commit']}"
        f"{note}):\n\n"
        f"```\n{text}\n```\n"
    )


# ---- local turns ----


def _local_turns() -> tuple[Json, str]:
    """The summary, and the line above a table of it."""
    summary = _read(_BENCHMARK / "local_turns" / "results" / "summary.json")
    note = f"{summary['note']}\n\n" if "note" in summary else ""
    return summary, made(summary, summary["command"]) + note


def local_turns() -> str:
    """benchmark/local_turns: all loads, and what is claimed."""
    summary, intro = _local_turns()
    tables = [
        f"{local_page.title(summary, clients)}:\n\n{markdown(*local_page.table(summary, clients))}"
        for clients in summary["load"]["cold_clients"]
    ]
    same = "identical" if summary["outputs_identical"] else "NOT identical"
    claims = "".join(f"- {claim}\n" for claim in local_page.claims(summary))
    shown = "\n".join(tables)
    return f"{intro}{shown}\nOutputs are {same} in all arms.\n\n{claims}"


def local_bounds(run: str) -> str:
    """benchmark/local_turns: the arms of the bound on inter-token latency."""
    summary = _read(_BENCHMARK / "local_turns" / "results" / f"{run}.json")
    (clients,) = dict.fromkeys(summary["load"]["cold_clients"])
    plays = len(summary["load"]["cold_clients"])
    title = f"{local_page.title(summary, clients)} of {plays} plays, medians of the plays:\n\n"
    rows = markdown(*local_page.bounds(summary, clients))
    kept = "".join(f"- {claim}\n" for claim in local_page.bounds_kept(summary))
    same = "identical" if summary["outputs_identical"] else "NOT identical"
    intro = made(summary, summary["command"])
    return f"{intro}{title}{rows}\nOutputs are {same} in all arms.\n\n{kept}"


# ---- the group lead on SGLang 0.5.23 ----

_LEAD = _BENCHMARK / "lead" / "results" / "rounds.jsonl"


def lead() -> str:
    """benchmark/lead: all loads, bounds and parts."""
    rows = lead_rows(_LEAD)
    runs = dict.fromkeys((row["date"], row["commit"], row["command"]) for row in rows)
    ran = ",\n".join(f"{date}, commit {commit}, by `{by}`" for date, commit, by in runs)
    return f"SGLang {rows[0]['sglang']}, {rows[0]['machine']}; {ran}:\n\n{lead_page.page(rows)}"


def lead_headline() -> str:
    """benchmark/lead: the answer."""
    return lead_page.headline(lead_rows(_LEAD))


def lead_answers() -> str:
    """docs/: the bounds and the parts."""
    return lead_page.answers(lead_rows(_LEAD))


# ---- buffer-only ----


def _hicache_command(summary: Json) -> str:
    load, command = summary["load"], "python -m benchmark.hicache_buffer_only"
    if len(summary["traces"]) == 1:
        command += f" --only {next(iter(summary['traces']))}"
    for name, option in (("conversation", "--trace"), ("agents", "--agents")):
        source = summary["traces"].get(name, {}).get("source", "a generated trace")
        if source != "a generated trace":
            command += f" {option} {source}"
    return f"{command} --requests {load['requests']} --speed {load['speed']:g}"


def hicache() -> str:
    """benchmark/hicache_buffer_only: hits, memory and times."""
    summary = _read(_BENCHMARK / "hicache_buffer_only" / "results" / "summary.json")
    parts = []
    for name, trace in summary["traces"].items():
        same = "identical" if trace["outputs_identical"] else "NOT identical"
        rounds = next(iter(trace["arms"].values()))["rounds"]
        parts.append(
            f"{name.capitalize()}: {trace['requests']} requests of {trace['source']}, {rounds} "
            f"round{'s' * (rounds > 1)} an arm. Outputs are {same}. An unlimited cache would hit "
            f"{trace['endless_hit_rate']:.1%}. {hicache_page.against_stock(trace)}"
            f"{hicache_page.measured(trace, summary['commit'])}\n\n"
            f"{markdown(*hicache_page.table(trace))}"
        )
    return made(summary, _hicache_command(summary)) + "\n".join(parts)


# ---- KV transfer ----


def progress_delay() -> str:
    """docs/upstream.md: what a pause of NIXL's progress thread is worth."""
    idle = transfer_page.by_arm("idle", "{idle_share_of_a_core[native threads]:.1%}")
    runs = radix_page.medians(_read(_RADIX / "throughput.summary.json"))
    rates = {name: run["summary"]["requests_per_s"] for name, run in runs.items()}
    return (
        f"NIXL's threads of an idle prefill process take {idle['stock']} of a core without the "
        f"pause and {idle['ours']} with it. A pair with the radix cache serves "
        f"{rates['flag, spinning']:.2f} requests/s without it and {rates['flag']:.2f} with it.\n"
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


def _refused(flag: str) -> dict[str, str]:
    """The settings, as they are written, each with the reason."""
    rows = (*refusals.AS_GIVEN, *refusals.ALWAYS, *refusals.MODELS)
    return {_code(row.other): _code(row.why) for row in rows if flag in row.flags}


def _code(text: str) -> str:
    """Flags, with their value, and variables as code."""
    return re.sub(r"(--[\w-]+(?: \w+$)?|SGLANG_\w+(?:=1)?)", r"`\1`", text)


TABLES: Mapping[str, Callable[[], str]] = {
    "worth": worth,
    "gains": gains,
    "throughput": throughput,
    "wire": wire,
    "speculation": speculation,
    "demo": demo,
    "local-turns": local_turns,
    "local-bounds": partial(local_bounds, "bounds"),
    "local-bounds-long": partial(local_bounds, "bounds_long"),
    "lead": lead,
    "lead-answers": lead_answers,
    "lead-headline": lead_headline,
    "hicache": hicache,
    "admission-epyc": partial(admission_page.table, "epyc"),
    "admission-xeon": partial(admission_page.table, "xeon"),
    "transfer": transfer_page.transfer,
    "transfer-delays": transfer_page.delays,
    "transfer-pauses": transfer_page.pauses,
    "progress-delay": progress_delay,
    "refused": refused,
    "refused-radix": partial(refused_with, flags.FLAG),
    "refused-turns": partial(refused_with, flags.LOCAL),
    "refused-buffer": partial(refused_with, flags.ON),
    **{f"variables-{group}": partial(variables, group) for group in environment.GROUPS},
    **{f"replaced-{g.name.replace('_', '-')}": partial(replaced.table, g.name) for g in GROUPS},
}

FILES = tuple(
    path
    for folder in (REPOSITORY, _BENCHMARK, REPOSITORY / "docs")
    for path in sorted(folder.glob("*.md" if folder == REPOSITORY else "**/*.md"))
    if "<!-- table:" in path.read_text()
)


def render(text: str) -> str:
    """``text`` with every table in it as the results have it.

    Raises:
        KeyError: a table that nobody makes.
    """
    return _TABLE.sub(lambda found: f"{found[1]}{TABLES[found[2]]()}{found[3]}", text)


def main() -> int:
    """Rewrites what has changed, and names it."""
    argparse.ArgumentParser(prog="python -m benchmark tables", description=__doc__).parse_args()
    for path in FILES:
        before = path.read_text()
        if (after := render(before)) != before:
            path.write_text(after)
            print(path.relative_to(REPOSITORY))
    return 0


def _read(path: Path) -> Any:
    return json.loads(path.read_text())


def _megabytes(count: float | None) -> str:
    return "" if count is None else f"{count / 1e6:,.1f} MB"


if __name__ == "__main__":
    sys.exit(main())
