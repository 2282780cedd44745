"""The page: Markdown, and HTML of it. Its numbers are those of the run's summary."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from benchmark.agentic.fleet.spec import counted
from benchmark.agentic.report.numbers import (
    COMPARED,
    NAMES,
    QUANTITIES,
    STAGES,
    STATISTICS,
    Interval,
)
from benchmark.agentic.report.verdict import ROUNDS, SHARE, percent, seconds, share
from benchmark.agentic.studies.record import Run
from benchmark.harness.report import markdown
from benchmark.traces.record import BLOCK_TOKENS

_TIMES = tuple(f"{NAMES[q]}: {' / '.join(STATISTICS)}" for q in QUANTITIES)

Json = Mapping[str, Any]


def page(run: Run, told: Json, figures: Mapping[str, str]) -> str:
    """``told``: its ``summary``. ``figures``: title to file, relative to the page."""

    def table(columns: Sequence[str], cells: Callable[[Json], Iterable[Sequence[str]]]) -> str:
        """The rows of each arm at each load; nothing where none has any."""
        rows = [
            [load, run.titles[arm], *row]
            for load, arms in told["loads"].items()
            for arm, numbers in arms.items()
            for row in cells(numbers)
        ]
        return markdown(["load", "arm", *columns], rows) if rows else ""

    parts = [
        f"# {run.study.title}",
        told["answer"],
        f"**Setup.** {run.study.question}",
        f"**Measured** on {run.environment['date']}: {_where(run)}. Arms take turns; rounds: "
        f"{run.study.rounds}.",
        f"**Command:** `{run.command}`",
        "## Service level objective (SLO)",
        f"A request meets the SLO with TTFT at most {run.study.slo.ttft_s:g} s and TPOT at most "
        f"{run.study.slo.tpot_s * 1e3:g} ms. An arm meets it if {SHARE:.0%} of requests do and "
        "none fails.",
        "\n".join(f"- {text}" for text in told["breaks"]),
        *_titled("Claims", "Ratios of means, with 95 % intervals.", _claims(run, told)),
        "## Before believing a number" if told["warnings"] else "",
        "\n".join(f"- {text}" for text in told["warnings"]),
        *_levels(run, told),
        "## By class",
        f"{run.trace['classes']}. New tokens are prompt tokens that an unlimited cache, shared by "
        "all, would not hit.",
        table(["class", "requests", *_TIMES], _by_class),
        *_events(run, told),
        *_titled(
            "By worker",
            "Means of the rounds, busiest worker first. *Prompt tokens*: the worker's share. "
            "*Hit rate*: the cached part of its prompt tokens; a pair reports prefill's cache. "
            "*Imbalance*: the busiest worker's share divided by an even share.",
            table(["prompt tokens", "hit rate", "imbalance"], _by_worker),
        ),
        *_titled(
            "Stages of a transfer",
            "Mean times of one chunk to one decode server. *Queue*: from submission until a worker "
            "takes it. *Build*: making its descriptors. *Post*: the transport's calls that start "
            "it. *Wire*: from then until it is seen complete. The stock release counts none.",
            table(["transfers", *STAGES], _stages),
        ),
        "## Figures" if figures else "",
        *(f"![{title}]({file})" for title, file in figures.items()),
        "## The load",
        _load(run),
        _same(told),
        "## The client, and each round",
        "*Sent late*: how long after its time a request was sent, p99. *Read late*: how long the "
        f"client's event loop was held up, p99. *Rounds*: mean {NAMES[run.study.by]} of each.",
        table(["reached", "sent late", "read late", "rounds"], _rounds),
    ]
    return "\n\n".join(part.rstrip() for part in parts if part) + "\n"


def _claims(run: Run, told: Json) -> str:
    """What others or this package's pages say, beside what was measured."""
    rows = []
    for of in told["claims"]:
        bounds = (("at most", of["at_most"]), ("at least", of["at_least"]))
        bound = " and ".join(f"{word} {x:g}" for word, x in bounds if x is not None)
        said = [of["claim"], of["load"], of["theirs"] or bound]
        rows.append([*said, share(of["ours"]), of["verdict"]])
    return markdown(["claim", "load", "theirs", "ours", ""], rows) if rows else ""


def _titled(title: str, text: str, table: str) -> Iterator[str]:
    if table:
        yield from (f"## {title}", text, table)


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
            f"each arm and round, each with a KV pool of {fleet['pool_tokens']:,} tokens. They run "
            "at a lower priority than client and router, since all share the cores"
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
    think = "its recorded gap" if load.think_s is None else f"{load.think_s:g} s"
    steady = (
        f"A session that ends is replaced. After {load.window.warm_up} answers the window opens; "
        f"requests that begin in it count, at least {load.window.requests}, and "
        f"{load.window.of_class} of each class. The load goes on until these have ended. "
        if load.window
        else ""
    )
    if (made := run.study.made) is not None:
        return (
            f"{steady}Sessions have {made.turns} turns: {made.prefix_tokens} tokens of one of "
            f"{made.prefixes} shared prefixes, {made.first_tokens} of their own, and "
            f"{made.turn_tokens} new ones a later turn behind the history with all answers, of "
            f"{made.answer_tokens} tokens. {made.cold_share:.0%} of the requests are cold: "
            f"{made.cold_tokens} tokens that share nothing, {made.cold_answer_tokens} of answer. "
            f"Fields that a load names are otherwise there. The next turn is sent {think} after "
            f"the previous answer. A failed request counts as {load.timeout_s:g} s."
        )
    if (of := trace.get("described")) is None:
        return f"{steady}{trace['source']}. A failed request counts as {load.timeout_s:g} s."
    lengths = "; ".join(
        f"{what} tokens mean {x['mean']:,.0f}, p50 {x['p50']:,.0f}, p90 {x['p90']:,.0f}, p99 "
        f"{x['p99']:,.0f}"
        for what, x in (("input", of["input_tokens"]), ("output", of["output_tokens"]))
    )
    left_out = trace["left_out"]
    how = (
        "a constant number of sessions, each started when another ends"
        if load.sessions
        else "sessions at the trace's times, scaled to the load"
    )
    taken = "all of it"
    if run.study.trace.requests:
        taken = f"sessions of its densest {run.study.trace.window_s:g} s, {trace['ratio']:.0%} kept"
    return (
        f"{steady}From {trace['source']}, {taken}: {of['requests']:,} requests in "
        f"{of['sessions']:,} sessions, {of['multi_turn_sessions']:.0%} of several turns; "
        f"{lengths}. An unlimited cache would hit {of['hit']:.1%} of the input tokens.\n\n"
        f"A block of {BLOCK_TOKENS} tokens became {run.fleet['block_tokens']}"
        + (f", answers {run.fleet['answers']:g} of their length" if run.fleet["answers"] else "")
        + (f", at most {most} tokens" if (most := run.fleet["max_answer_tokens"]) else "")
        + (f"; {left_out} requests too long for the fleet were left out" if left_out else "")
        + f". Replayed: {trace['requests']:,} requests{_asked(run)} with "
        f"{trace['prompt_tokens']:,} prompt and {trace['output_tokens']:,} answer tokens"
        f"{_largest(run)}; {how}. The next turn is sent {think} after the previous answer. A "
        f"failed request counts as {load.timeout_s:g} s."
    )


def _same(told: Json) -> str:
    if told["answers"] is None:
        return ""
    compared, different = told["answers"]
    same = "all identical" if not different else f"{different} differ"
    return f"Answers, as token ids: {compared:,} requests were answered several times, {same}."


def _asked(run: Run) -> str:
    """Where sampling whole sessions gave another number than the study asks for."""
    asked = run.study.trace.requests
    return f" (asked for: {asked:,})" if asked and asked != run.trace["requests"] else ""


def _largest(run: Run) -> str:
    """The largest request against the pool, where both are known."""
    largest, pool = run.trace.get("largest_tokens"), run.fleet["pool_tokens"]
    if not largest:
        return ""
    text = f", the largest request {largest:,}"
    return text + (f" ({largest / pool:.0%} of a pool)" if pool else "")


def _levels(run: Run, told: Json) -> Iterator[str]:
    columns = ["arm", "requests/s", "failed", "meet SLO", "goodput/s", *_TIMES, "ITL p99"]
    columns.append("hit rate")
    columns += ["concurrent, mean / max", "pool p50 / max", "KV moved", "local prefill"]
    for load, arms in told["loads"].items():
        head, *over = load.split(", ")
        yield f"## {', '.join((f'{head} {run.unit}', *over))}"
        yield markdown(columns, [[run.titles[arm], *_row(of)] for arm, of in arms.items()])
        base, *others = arms
        if others:
            yield (
                f"Ratios to {run.titles[base]}, with 95 % intervals: bootstrap over rounds and "
                "sessions, at least as wide as Student's t over rounds. Bold: the interval "
                "excludes 1."
            )
            head = ["arm", *(f"{NAMES[q]} {s}" for q in QUANTITIES for s in COMPARED)]
            yield markdown(head, [[run.titles[arm], *_ratios(arms[arm])] for arm in others])


def _row(of: Json) -> Iterator[str]:
    yield f"{of['requests_per_s']:.2f}"
    yield str(of["failed"])
    yield percent(of["slo"])
    yield f"{of['goodput_per_s']:.2f}"
    for quantity in QUANTITIES:
        yield _times(interval.value for interval in of[quantity].values())
    yield _times([sum(of["itl_p99"]) / len(of["itl_p99"])])
    yield "-" if math.isnan(of["hit_rate"]) else f"{of['hit_rate']:.1%}"
    yield "{mean:.1f} / {most}".format(**of["at_once"])
    yield "-" if of["pool"] is None else "{p50:.0%} / {max:.0%}".format(**of["pool"])
    moved = of["bytes_moved"]
    yield "-" if moved is None else f"{moved / 1e6:,.1f} MB"
    yield "-" if moved is None else f"{of['local_tokens']:,.0f} tokens"


def _ratios(of: Json) -> Iterator[str]:
    for quantity in QUANTITIES:
        for ratio in of["of_first_arm"][quantity].values():
            bold = "**" if len(of["rounds"]) >= ROUNDS and ratio.excludes_one else ""
            yield f"{bold}{share(ratio)}{bold}"


def _by_class(of: Json) -> Iterator[list[str]]:
    for name, found in of["classes"].items():
        times = (_times(found[quantity].values()) for quantity in QUANTITIES)
        yield [name, str(found["requests"]), *times]


def _by_worker(of: Json) -> Iterator[list[str]]:
    if len(workers := of["by_worker"]) > 1:
        shares, hits = ([each[name] for each in workers] for name in ("prompt_tokens", "hit_rate"))
        cells = (" / ".join(f"{x:.0%}" for x in each) for each in (shares, hits))
        yield [*cells, f"{shares[0] * len(shares):.2f}"]


def _stages(of: Json) -> Iterator[list[str]]:
    if stages := of["stages"]:
        yield [f"{of['transfers']:,.0f}", *(f"{mean * 1e3:.2f} ms" for mean in stages.values())]


def _rounds(of: Json) -> Iterator[list[str]]:
    late = (f"{of['client'][name] * 1e3:.1f} ms" for name in ("late_p99", "read_late_p99"))
    means = ", ".join(f"{x * 1e3:,.0f}" for x in of["rounds"])
    yield [of["reached"], *late, f"{means} ms"]


def _times(of: Iterable[float]) -> str:
    """Mean and percentiles, ms."""
    found = [value * 1e3 for value in of]
    if math.isnan(found[0]):
        return "-"
    digits = 1 if found[0] < 100 else 0
    return " / ".join(f"{x:,.{digits}f}" for x in found) + " ms"


def _events(run: Run, told: Json) -> Iterator[str]:
    """What a prompt that nobody has seen costs the answers beside it, where any was sent."""
    rows = []
    names: list[str] = []
    for load, arms in told["loads"].items():
        found = {arm: of["prefill_events"] for arm, of in arms.items() if of["prefill_events"]}
        names = names or list(found)
        base = next(iter(found.values()), None)
        for arm, of in found.items():
            gained, paid = (of[name].value - base[name].value for name in ("lost", "ttft"))
            tokens: Interval = of["lost_tokens"]
            rows.append(
                [
                    load,
                    run.titles[arm],
                    str(of["prefills"]),
                    seconds(of["ttft"]),
                    f"{of['running']:.1f}",
                    f"{of['tpot_outside'] * 1e3:,.1f} / {of['tpot_within'] * 1e3:,.1f} ms",
                    f"{tokens.value:.1f} [{tokens.low:.1f}, {tokens.high:.1f}]",
                    seconds(of["lost"]),
                    f"{of['share_lost']:.2f}",
                    "-" if of is base else f"{-gained * 1e3:,.0f} / {paid * 1e3:,.0f} ms",
                ]
            )
    columns = ["load", "arm", "prefills", "TTFT of the new prompt", "running answers"]
    columns += ["their TPOT without / with", "tokens lost", "answer time lost"]
    columns += ["share lost", "gained / paid"]
    return _titled(
        "Per prefill of the cold client",
        "A prefill here is the time from sending a prompt of the cold client to its first token. "
        "*Running answers*: how many are under way meanwhile, and their TPOT without and with a "
        "prefill. *Tokens lost*: what they generate less than at their rate without one. *Answer "
        "time lost*: the same in time, summed over the answers. *Share lost*: that time over "
        "answers times seconds. 95 % intervals are a bootstrap over prefills."
        + (
            f" *Gained*: by how much less answer time is lost than with {run.titles[names[0]]}. "
            "*Paid*: by how much the new prompt's TTFT is longer."
            if len(names) > 1
            else ""
        ),
        markdown(columns, rows) if rows else "",
    )
