"""The page: Markdown, and HTML of it. Every number on it comes from the run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from benchmark.agentic.fleet.spec import counted
from benchmark.agentic.load.outcome import NAMES as CLASSES
from benchmark.agentic.load.outcome import client
from benchmark.agentic.report.events import Events, events
from benchmark.agentic.report.numbers import (
    COMPARED,
    NAMES,
    QUANTITIES,
    STAGES,
    STATISTICS,
    Level,
    Values,
    plain,
)
from benchmark.agentic.report.verdict import (
    ROUNDS,
    answer,
    breaks,
    percent,
    seconds,
    share,
    warnings,
)
from benchmark.agentic.studies.record import Run
from benchmark.harness.report import markdown
from benchmark.traces.record import BLOCK_TOKENS

_TIMES = tuple(f"{NAMES[q]}: {' / '.join(STATISTICS)}" for q in QUANTITIES)


def page(run: Run, levels: Sequence[Level], figures: Mapping[str, str]) -> str:
    """``figures``: title to file, relative to the page."""
    of = run.environment
    base = next(iter(run.titles.values()))
    notes = list(warnings(run, levels))
    parts = [
        f"# {run.study.title}",
        answer(run, levels),
        f"*{run.study.question}* Measured on {of['date']}: {_where(run)}; all arms in turn, "
        f"{run.study.rounds} times. Written by `{run.command}`.",
        "## Where each breaks",
        "\n".join(f"- {text}" for text in breaks(run, levels)),
        *(["## Before believing a number", "\n".join(f"- {text}" for text in notes)] * bool(notes)),
        *_levels(run, levels, base),
        "## By class",
        f"{run.trace['classes']}. New tokens are those that an endless cache, shared by all, would "
        "not hold.",
        markdown(["load", "arm", "class", "requests", *_TIMES], list(_by_class(run, levels))),
        *_details(run, levels),
        "## Figures" if figures else "",
        *(f"![{title}]({file})" for title, file in figures.items()),
        "## The load",
        _load(run),
        "## The client, and each round",
        "How late requests were sent, and how late this program was in reading (p99); and the mean "
        f"{NAMES[run.study.by]} of each round.",
        markdown(
            ["load", "arm", "reached", "sent late", "read late", "rounds"],
            list(_rounds(run, levels)),
        ),
    ]
    return "\n\n".join(part.rstrip() for part in parts if part) + "\n"


def html(text: str, title: str) -> str:
    """The page for a browser; figures stay files beside it."""
    from markdown_it import MarkdownIt

    body = MarkdownIt("commonmark").enable("table").render(text)
    style = (
        "body{font:15px/1.5 system-ui,sans-serif;max-width:72rem;margin:2rem auto;padding:0 1rem}"
        "table{border-collapse:collapse;font-size:13px}td,th{border:1px solid #ccc;"
        "padding:.2rem .5rem;text-align:left}img{max-width:100%}"
    )
    return (
        f'<!doctype html><meta charset="utf-8"><title>{title}</title><style>{style}</style>{body}'
    )


def _where(run: Run) -> str:
    of, fleet = run.environment, run.fleet
    if fleet["rig"]:
        return (
            f"{of['machine']}; SGLang {of['sglang']}, commit {of['commit']}; fresh servers for "
            f"each arm and round, a KV pool of {fleet['pool_tokens']:,} tokens each, at a lower "
            "priority than client and router, as all share the cores"
        )
    return (
        f"a fleet by address{_servers(run)}, {fleet['endpoint']} endpoint, model {fleet['model']}; "
        f"sent from {of['machine']}, commit {of['commit']} of this project; the servers' own "
        "machines, versions and flags are not known"
    )


def _servers(run: Run) -> str:
    """Of each arm; a run of an earlier version does not know."""
    by_arm = {run.titles[arm]: counted(count) for arm, count in run.servers.items()}
    if not by_arm:
        return ""
    if len(set(by_arm.values())) == 1:
        told = f"{next(iter(by_arm.values()))} in every arm"
    else:
        told = ", ".join(of if of in title else f"{title}: {of}" for title, of in by_arm.items())
    return f" ({told}; the question counts the rig's)"


def _load(run: Run) -> str:
    trace, load = run.trace, run.study.load
    of = trace["described"]
    lengths = "; ".join(
        f"{what} tokens mean {x['mean']:,.0f}, p50 {x['p50']:,.0f}, p90 {x['p90']:,.0f}, p99 "
        f"{x['p99']:,.0f}"
        for what, x in (("input", of["input_tokens"]), ("output", of["output_tokens"]))
    )
    left_out = trace["left_out"]
    how = (
        "so many sessions at once, each begun as another ends"
        if load.sessions
        else "sessions at the trace's times, stretched or compressed to the load"
    )
    think = "its recorded gap" if load.think_s is None else f"{load.think_s:g} s"
    taken = "all of it"
    if run.study.trace.requests:
        taken = f"sessions of its densest {run.study.trace.window_s:g} s, {trace['ratio']:.0%} kept"
    return (
        f"From {trace['source']}, {taken}: {of['requests']:,} requests in {of['sessions']:,} "
        f"sessions, {of['multi_turn_sessions']:.0%} of several turns; {lengths}. An endless cache "
        f"would hit {of['hit']:.1%} of the input tokens.\n\n"
        f"A block of {BLOCK_TOKENS} tokens became {run.fleet['block_tokens']}"
        + (f", answers {run.fleet['answers']:g} of their length" if run.fleet["answers"] else "")
        + (f", at most {most} tokens" if (most := run.fleet["max_answer_tokens"]) else "")
        + (f"; {left_out} requests too long for the fleet were left out" if left_out else "")
        + f". Replayed: {trace['requests']:,} requests with {trace['prompt_tokens']:,} prompt and "
        f"{trace['output_tokens']:,} answer tokens{_largest(run)}, {how}; a next turn goes "
        f"out {think} after the answer before it. A failed request counts as {load.timeout_s:g} s."
    )


def _largest(run: Run) -> str:
    """The largest request against the pool, where both are known."""
    largest, pool = run.trace.get("largest_tokens"), run.fleet["pool_tokens"]
    if not largest:
        return ""
    text = f", the largest request {largest:,}"
    return text + (f" ({largest / pool:.0%} of a pool)" if pool else "")


def _levels(run: Run, levels: Sequence[Level], base: str) -> Iterator[str]:
    for level in levels:
        yield f"## {level.load:g} {run.unit}"
        columns = ["arm", "requests/s", "failed", "meet SLO", "goodput/s", *_TIMES, "hit rate"]
        columns += ["at once, mean / most", "pool p50 / max", "KV moved", "computed by decode"]
        yield markdown(columns, [_row(run, level, arm) for arm in level.cells])
        if len(level.cells) > 1:
            yield (
                f"Of {base}'s, with 95 % intervals (bootstrap over rounds and sessions); a "
                "difference is in bold."
            )
            head = ["arm", *(f"{NAMES[q]} {s}" for q in QUANTITIES for s in COMPARED)]
            yield markdown(head, list(_ratios(run, level)))


def _row(run: Run, level: Level, arm: str) -> list[str]:
    row = [run.titles[arm], f"{level.per_s(arm, lambda o: o.error is None):.2f}"]
    row += [str(level.failed(arm)), percent(level.interval(level.values(arm, "slo")))]
    row += [f"{level.goodput(arm):.2f}"]
    row += [spread(level.values(arm, quantity)) for quantity in QUANTITIES]
    hit = level.hit_rate(arm)
    at_once, most = level.open(arm)
    row += ["-" if math.isnan(hit) else f"{hit:.1%}", f"{at_once:.1f} / {most}"]
    pool = level.pool(arm)
    row += ["-" if pool is None else f"{pool[0]:.0%} / {pool[1]:.0%}"]
    moved = level.moved(arm)
    row += ["-" if moved is None else f"{moved.bytes_moved / 1e6:,.1f} MB"]
    row += ["-" if moved is None else f"{moved.local_tokens:,.0f} tokens"]
    return row


def _ratios(run: Run, level: Level) -> Iterator[list[str]]:
    base, *others = level.cells
    told = level.rounds >= ROUNDS
    for arm in others:
        row = [run.titles[arm]]
        for quantity in QUANTITIES:
            mine, other = level.values(arm, quantity), level.values(base, quantity)
            for name in COMPARED:
                of = level.ratio(mine, other, STATISTICS[name])
                bold = "**" if told and of.excludes_one else ""
                row.append(f"{bold}{share(of)}{bold}")
        yield row


def _by_class(run: Run, levels: Sequence[Level]) -> Iterator[list[str]]:
    for level in levels:
        for arm in level.cells:
            for name in CLASSES:
                if count := level.classes.count(name):
                    times = (spread(level.values(arm, quantity, name)) for quantity in QUANTITIES)
                    yield [f"{level.load:g}", run.titles[arm], name, str(count), *times]


def _rounds(run: Run, levels: Sequence[Level]) -> Iterator[list[str]]:
    for level in levels:
        for arm, cells in level.cells.items():
            of = client(level.outcomes(arm))
            late = (f"{x * 1e3:.1f} ms" for x in (of.late_p99_s, of.loop_lag_p99_s))
            means = ", ".join(
                f"{x * 1e3:,.0f}" for x in level.means(arm, run.study.by)
            )
            yield [f"{level.load:g}", run.titles[arm], cells[0].via, *late, f"{means} ms"]


def spread(values: Values) -> str:
    """Mean and percentiles, ms."""
    found = [plain(values, of) * 1e3 for of in STATISTICS.values()]
    if math.isnan(found[0]):
        return "-"
    digits = 1 if found[0] < 100 else 0
    return " / ".join(f"{x:,.{digits}f}" for x in found) + " ms"


def _details(run: Run, levels: Sequence[Level]) -> Iterator[str]:
    """Sections that only some runs have: prefill events, by worker, a transfer's stages."""
    if rows := list(_event_rows(run, levels)):
        yield "## Per prefill of the cold client"
        yield (
            "A prompt that nobody has seen, from its sending to its first token; the answers that "
            "ran meanwhile, what they lacked of their rate outside of such events, and as answer "
            "time of all of them together. 95 % intervals from draws of events. *Gained / paid*: "
            f"of that time, what the arm loses less than {next(iter(run.titles.values()))}, over "
            "what its new prompt takes longer. *Of their seconds*: the share of answers times "
            "seconds that was lost."
        )
        columns = ["load", "arm", "prefills", "new prompt's TTFT", "answers running"]
        columns += ["their TPOT outside / within", "tokens lost", "answer time lost"]
        yield markdown([*columns, "of their seconds", "gained / paid"], rows)
    if rows := list(_workers(run, levels)):
        yield "## By worker"
        yield (
            "Busiest first, the mean of the rounds: share of the prompt tokens, and what its cache "
            "held of them. Imbalance is the busiest worker's share over an even one."
        )
        yield markdown(["load", "arm", "prompt tokens", "hit rate", "imbalance"], rows)
    if rows := list(_stages(run, levels)):
        yield "## Stages of a transfer"
        yield (
            "Of a chunk to one decode server, means: from submission until a worker takes it up, "
            "making its descriptors, the transport's calls that start it, and from then until it "
            "was seen to be over. The stock release counts none."
        )
        yield markdown(["load", "arm", "transfers", *STAGES], rows)


def _event_rows(run: Run, levels: Sequence[Level]) -> Iterator[list[str]]:
    for level in levels:
        found = {arm: of for arm in level.cells if (of := events(level, arm)) is not None}
        base = next(iter(found.values()), None)
        for arm, of in found.items():
            yield [
                f"{level.load:g}",
                run.titles[arm],
                str(of.count),
                seconds(of.seconds),
                f"{of.running:.1f}",
                f"{of.outside_s * 1e3:,.1f} / {of.within_s * 1e3:,.1f} ms",
                f"{of.lost_tokens.value:.1f} [{of.lost_tokens.low:.1f}, {of.lost_tokens.high:.1f}]",
                seconds(of.stalled_s),
                f"{of.share:.2f}",
                "-" if base is None or of is base else _against(of, base),
            ]


def _against(of: Events, base: Events) -> str:
    gained = base.stalled_s.value - of.stalled_s.value
    paid = of.seconds.value - base.seconds.value
    return f"{gained * 1e3:,.0f} / {paid * 1e3:,.0f} ms"


def _workers(run: Run, levels: Sequence[Level]) -> Iterator[list[str]]:
    for level in levels:
        for arm in level.cells:
            if len(of := level.by_worker(arm)) > 1:
                shares, hits = zip(*of, strict=True)
                yield [
                    f"{level.load:g}",
                    run.titles[arm],
                    " / ".join(f"{share:.0%}" for share in shares),
                    " / ".join(f"{hit:.0%}" for hit in hits),
                    f"{shares[0] * len(shares):.2f}",
                ]


def _stages(run: Run, levels: Sequence[Level]) -> Iterator[list[str]]:
    for level in levels:
        for arm in level.cells:
            if (of := level.stages(arm)) is not None:
                means = (f"{mean * 1e3:.2f} ms" for mean in of.values())
                yield [f"{level.load:g}", run.titles[arm], f"{level.transfers(arm):,.0f}", *means]
