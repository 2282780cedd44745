"""The page of a study, made from the run's summary."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from benchmark.agentic.fleet.spec import counted
from benchmark.agentic.load.sessions import COLD_ANSWER
from benchmark.agentic.report.numbers import (
    AGAINST,
    COMPUTED,
    NAMES,
    QUANTITIES,
    STAGES,
    STATISTICS,
    TIERS,
)
from benchmark.agentic.report.verdict import SHARE, percent, share, spread
from benchmark.harness.report import markdown
from benchmark.traces.record import BLOCK_TOKENS

Json = Mapping[str, Any]
CLAIMS = ("claim", "load", "published; compared with", "ours", "verdict")
CLASS = 30
"""Minimum number of requests of a class at a load for the page to show the class."""


class Column(NamedTuple):
    """A column of a table: numbers of an arm at a load, side by side."""

    head: str
    names: tuple[str, ...]
    form: str = ",.0f"
    scale: float = 1.0
    unit: str = ""
    spread: bool = False
    """True if the interval is shown."""

    def shown(self, numbers: Json) -> str:
        """Return the cell's text, or a dash if the arm has no number."""
        values = [three(numbers.get(name)) for name in self.names]
        if math.isnan(values[0][0]):
            return "-"
        scaled = [[x * self.scale for x in value] for value in values]
        if self.spread:
            return spread(scaled[0], self.form, self.unit)
        return (
            " / ".join("-" if math.isnan(x[0]) else f"{x[0]:{self.form}}" for x in scaled)
            + self.unit
        )


WHOLE = [
    Column("hit rate", ("hit_rate",), ".2f"),
    Column("computed over new tokens", (COMPUTED,), ".2f"),
    Column("KV moved a request", ("bytes_moved",), ",.0f", 1e-3, " KB"),
    Column("TTFT: mean / p50", ("ttft_mean", "ttft_p50"), ",.0f", 1e3, " ms"),
    Column("ITL p99", ("itl_p99",), ",.0f", 1e3, " ms"),
    Column("end-to-end time", ("e2e_mean",), ",.0f", 1e3, " ms"),
    Column("goodput/s", ("goodput",), ".1f"),
    Column("memory for KV", ("memory_bytes",), ",.0f", 1e-6, " MB"),
]
"""Columns of the page about the whole system."""
SHORT = [
    Column("KV from prefill to decode, a request", ("bytes_moved",), ",.0f", 1e-3, " KB"),
    Column("requests/s", ("requests_per_s",), ".1f"),
    Column("mean TTFT", ("ttft_mean",), ",.0f", 1e3, " ms"),
    Column("mean time of a request", ("e2e_mean",), ",.0f", 1e3, " ms"),
    Column("inter-token latency, p99", ("itl_p99",), ".1f", 1e3, " ms"),
    Column("TTFT at most 1 s, TPOT at most 50 ms", ("slo",), ".0%"),
]
"""Rows of README.md's table."""


def three(number: Any) -> list[float]:
    """Return a summary's number as value, low and high, NaN where the summary has none."""
    three = number if isinstance(number, (list, tuple)) else [number, None, None]
    return [math.nan if x is None else float(x) for x in three]


TIMES = [
    Column(
        f"{NAMES[q]}: {' / '.join(STATISTICS)}",
        tuple(f"{q}_{s}" for s in STATISTICS),
        ",.0f",
        1e3,
        " ms",
    )
    for q in QUANTITIES
]
RESULTS = [
    Column("requests/s", ("requests_per_s",), ".2f", spread=True),
    Column("goodput/s", ("goodput",), ".2f", spread=True),
    *TIMES,
    Column("ITL p99", ("itl_p99",), ",.1f", 1e3, " ms", spread=True),
    Column("hit rate", ("hit_rate",), ".1%"),
    Column("computed over new tokens", (COMPUTED,), ".2f", spread=True),
    Column("concurrent: mean / max", ("at_once", "at_most"), ",.1f"),
]
COUNTED = [
    Column("KV moved a request", ("bytes_moved",), ",.0f", 1e-3, " KB", spread=True),
    Column("tokens a request from decode's cache", ("hit_tokens",)),
    Column("computed by decode", ("local_tokens",)),
    Column("loopback interface a request", ("loopback_bytes",), ",.0f", 1e-3, " KB"),
    Column("KV pool: p50 / max", ("usage_p50", "usage_max"), ".0%"),
    Column("cached on: device / host / store", TIERS, ".1%"),
    Column("host memory: pools / store", ("host_bytes", "store_bytes"), ",.1f", 1e-6, " MB"),
    Column("device pools", ("device_bytes",), ",.1f", 1e-6, " MB"),
    Column("memory for KV in all", ("memory_bytes",), ",.1f", 1e-6, " MB"),
    Column("imbalance", ("imbalance",), ".2f"),
    Column("transfers a request", ("transfers",), ".2f"),
    Column(f"stages: {' / '.join(STAGES)}", STAGES, ".2f", 1e3, " ms"),
]
EVENTS = [
    Column("prefills a round", ("prefills",)),
    Column("TTFT of the cold prompt", ("prefill_s",), ",.0f", 1e3, " ms", spread=True),
    Column("running answers", ("running",), ".1f"),
    Column("their TPOT without / with", ("tpot_outside", "tpot_within"), ",.1f", 1e3, " ms"),
    Column("tokens lost", ("lost_tokens",), ".1f", spread=True),
    Column("answer time lost", ("lost_s",), ",.0f", 1e3, " ms", spread=True),
    Column("share lost", ("share_lost",), ".2f", spread=True),
]
CLIENT = [
    Column("sent late", ("late_p99",), ",.1f", 1e3, " ms"),
    Column("read late", ("read_late_p99",), ",.1f", 1e3, " ms"),
]


def page(summary: Json, figures: Mapping[str, str]) -> str:
    """Return the page. ``summary``: that of a run. ``figures``: title -> file name."""
    study, slo = summary["study"], summary["study"]["slo"]
    parts = [
        f"# {study['title']}",
        summary["answer"],
        f"**Setup.** {study['question']}",
        f"**Measured** on {summary['date']}: {_where(summary)}. Arms take turns; rounds: "
        f"{study['rounds']}. Loads are in {summary['unit']}. Numbers are means of the rounds, with "
        "95 % intervals by Student's t over the rounds.",
        f"**Command:** `{summary['command']}`",
        *(f"![{title}]({file})" for title, file in figures.items()),
        *_titled(
            "Claims",
            "Ratios of two arms, or a number of one arm, with 95 % intervals.",
            markdown(CLAIMS, claim_rows(summary["claims"])) if summary["claims"] else "",
        ),
        "## Before believing a number" if summary["warnings"] else "",
        "\n".join(f"- {text}" for text in summary["warnings"]),
        *_titled("Results", _ABOUT_RESULTS, results(summary)),
        *_titled("Against the first arm", _ABOUT_RATIOS, ratios(summary)),
        "## Service level objective (SLO)",
        f"A request meets the SLO with TTFT at most {slo['ttft_s']:g} s and TPOT at most "
        f"{slo['tpot_s'] * 1e3:g} ms. An arm meets it if {SHARE:.0%} of requests do and none "
        "fails. *Goodput*: requests/s that meet it.",
        "\n".join(f"- {text}" for text in summary["holds"]),
        *_titled("What the servers counted", _ABOUT_COUNTED, counters(summary)),
        *_titled("Per cold prompt", _ABOUT_EVENTS, _columns(summary, EVENTS)),
        *_titled(
            "By class",
            f"{summary['trace']['classes']}. Classes with fewer than {CLASS} requests are "
            "left out.",
            _table(summary, ["class", "requests", *(c.head for c in TIMES)], _by_class),
        ),
        "## The load",
        _load(summary),
        summary["answers"]
        and "Answers, as token ids: {:,} requests were answered by several arms, {:,} of them "
        "differently.".format(*summary["answers"]),
        *_titled(
            "The client, and each round",
            "*Sent late*: how long after its time a request was sent, p99. *Read late*: how long "
            f"the client's event loop was held up, p99. *Rounds*: mean {NAMES[study['by']]}.",
            _table(summary, ["reached", *(c.head for c in CLIENT), "rounds"], _rounds),
        ),
    ]
    return "\n\n".join(part.rstrip() for part in parts if part) + "\n"


_ABOUT_RESULTS = (
    "*Hit rate*: cached share of the prompt tokens, as the servers report. *Computed over new "
    "tokens*: the other prompt tokens, over those that no earlier request of the load had, in "
    "whole blocks. *Concurrent*: requests in flight at the client. Lower latency is better, and "
    "higher requests/s and goodput."
)
_ABOUT_RATIOS = (
    "Geometric means of the rounds' ratios, with intervals by Student's t. TTFT, TPOT and "
    "end-to-end time use only requests that both arms count. Bold: the interval excludes 1. In a "
    "grid, all intervals of a load hold together with 95 %. Otherwise each interval holds by "
    "itself; the sentences at the top use wider ones, which all hold together."
)
_ABOUT_COUNTED = (
    "*KV moved*: from prefill to decode. *From decode's cache*: hits in its radix cache. *Loopback "
    "interface*: all bytes that the kernel carried, requests and answers included, but not NIXL's "
    "shared memory. *KV pool*: of a decoding server, sampled each second. *Host memory*: host "
    "pools or staging buffers of all servers, and their memory in the store. *Imbalance*: the "
    "busiest decoding server's share of prompt tokens over an even share. *Stages* of a transfer: "
    "from submission until a worker takes it; making its descriptors; the transport's calls; until "
    "it is seen complete. The stock release counts no stages."
)
_ABOUT_EVENTS = (
    "From sending a prompt of class COLD to its first token. *Running answers*: number in flight "
    "during that time, and their TPOT without and with such a prefill. *Tokens lost*: tokens that "
    "they generate less than at their rate without it. *Answer time lost*: the same as time, "
    "summed over the answers. *Share lost*: that time over answers times seconds."
)


def results(summary: Json) -> str:
    """Return one row for each arm at each load."""
    # Results of earlier versions lack some numbers.
    columns = [c for c in RESULTS if any(c.names[0] in numbers for numbers in _every(summary))]
    head = ["failed", "meet SLO", *(column.head for column in columns)]

    def row(cell: Json) -> Iterator[list[str]]:
        shown = (column.shown(cell["numbers"]) for column in columns)
        yield [str(cell["failed"]), percent(three(cell["numbers"].get("slo"))), *shown]

    return _table(summary, head, row)


def ratios(summary: Json) -> str:
    """Return the ratios of each arm to the first one, at each load."""

    def row(cell: Json) -> Iterator[list[str]]:
        if cell["of_first_arm"]:
            yield [_ratio(cell["of_first_arm"][name]) for name in AGAINST]

    return _table(summary, list(AGAINST.values()), row)


def _ratio(number: Any) -> str:
    value, low, high = three(number)
    if math.isnan(value):
        return "-"
    bold = "**" if low > 1 or high < 1 else ""
    return f"{bold}{share((value, low, high))}{bold}"


def counters(summary: Json) -> str:
    """Return the table of the servers' counters."""
    return _columns(summary, COUNTED)


def whole(summary: Json) -> str:
    """Return the gain of each part of the whole system, one row for each arm at each load."""
    return _columns(summary, WHOLE)


def claim_rows(claims: Sequence[Json]) -> list[list[str]]:
    """Return the claims of publications or of this package's pages, beside our measurements."""
    return [
        [row["claim"], row["load"], row["theirs"], share(three(row["ours"])), row["verdict"]]
        for row in claims
    ]


def _columns(summary: Json, columns: Sequence[Column]) -> str:
    """Return a table of the columns in which an arm has a nonzero number; rows without any number
    are left out."""
    every = _every(summary)
    there = [
        column
        for column in columns
        if any(abs(three(numbers.get(name))[0]) > 0 for numbers in every for name in column.names)
    ]

    def row(cell: Json) -> Iterator[list[str]]:
        shown = [column.shown(cell["numbers"]) for column in there]
        if set(shown) != {"-"}:
            yield shown

    return _table(summary, [column.head for column in there], row) if there else ""


def _every(summary: Json) -> list[Json]:
    """Return the numbers of each arm at each load."""
    return [cell["numbers"] for arms in summary["loads"].values() for cell in arms.values()]


def _table(
    summary: Json, columns: Sequence[str], rows: Callable[[Json], Iterable[Sequence[str]]]
) -> str:
    """Return the rows of each arm at each load; empty if there are none."""
    table_rows = [
        [load, summary["titles"][arm], *row]
        for load, arms in summary["loads"].items()
        for arm, cell in arms.items()
        for row in rows(cell)
    ]
    return markdown(["load", "arm", *columns], table_rows) if table_rows else ""


def _by_class(cell: Json) -> Iterator[list[str]]:
    for kind, times in cell["classes"].items():
        if times["requests"] >= CLASS:
            yield [kind, str(times["requests"]), *(column.shown(times) for column in TIMES)]


def _rounds(cell: Json) -> Iterator[list[str]]:
    means = ", ".join(f"{three(mean)[0] * 1e3:,.0f}" for mean in cell["rounds"])
    yield [cell["reached"], *(column.shown(cell["numbers"]) for column in CLIENT), f"{means} ms"]


def _titled(title: str, text: str, table: str) -> Iterator[str]:
    if table:
        yield from (f"## {title}", text, table)


def _where(summary: Json) -> str:
    fleet = summary["fleet"]
    if fleet["rig"]:
        return (
            f"{summary['machine']}; SGLang {summary['sglang']}, commit {summary['commit']}; fresh "
            f"servers for each arm and round, each with a KV pool of {fleet['pool_tokens']:,} "
            f"tokens. {_shared(fleet)}"
        )
    by_arm = {summary["titles"][arm]: counted(count) for arm, count in summary["servers"].items()}
    servers = ", ".join(s if s in title else f"{title}: {s}" for title, s in by_arm.items())
    if len(set(by_arm.values())) == 1:
        servers = f"{next(iter(by_arm.values()))} in every arm"
    sender = summary["sent_from"]
    return (
        f"a fleet by address ({servers}; the question counts the rig's), {fleet['endpoint']} "
        f"endpoint, model {fleet['model']}; sent from {sender['machine']}, commit "
        f"{sender['commit']} of this project; the servers' own machines, versions and flags are "
        "not known"
    )


def _shared(fleet: Json) -> str:
    """Return how the servers of a rig share the machine."""
    if fleet.get("gpus"):  # absent in results of earlier versions
        return f"Each has GPUs of its own; the model is {fleet['model']}"
    return "Servers have lower priority than client and router, since all share the cores"


def _load(summary: Json) -> str:
    trace, fleet, load, made = (
        summary["trace"],
        summary["fleet"],
        summary["study"]["load"],
        summary["study"]["made"],
    )
    text = ""
    if window := load["window"]:
        pace = "A session that ends is replaced."
        if load.get("requests_per_s"):  # absent in results of earlier versions
            pace = "Sessions begin at random times (Poisson), whether or not earlier ones ended."
        text = (
            f"{pace} The window opens after {window['warm_up']} answers, "
            "or after two per session if that is more. Requests that begin in it count. The window "
            f"closes when {window['requests']} requests, and {window['of_class']} of each class, "
            f"have begun, or after {window['limit_s']:g} s. The load goes on until these have "
            "ended. "
        )
    if made is not None:
        text += (
            f"Sessions have {made['turns']} turns: {made['prefix_tokens']} tokens of one of "
            f"{made['prefixes']} shared prefixes, {made['first_tokens']} of their own, and "
            f"{made['turn_tokens']} new ones a later turn behind the history with all answers, of "
            f"{made['answer_tokens']} tokens. {made['cold_share']:.0%} of the requests are cold: "
            f"{made['cold_tokens']} tokens that share nothing, and an answer of {COLD_ANSWER}. "
            "A load that names some of these fields has its own values of them."
        )
    elif (described := trace.get("described")) is None:
        text += f"{trace['source']}."
    else:
        lengths = "; ".join(
            f"{what} tokens mean {x['mean']:,.0f}, p50 {x['p50']:,.0f}, p90 {x['p90']:,.0f}, p99 "
            f"{x['p99']:,.0f}"
            for what, x in (
                ("input", described["input_tokens"]),
                ("output", described["output_tokens"]),
            )
        )
        asked, sent = summary["study"]["trace"]["requests"], trace["requests"]
        text += (
            f"From {trace['source']}, {trace['ratio']:.0%} of its sessions kept: "
            f"{described['requests']:,} requests in {described['sessions']:,} sessions, "
            f"{described['multi_turn_sessions']:.0%} with several turns; {lengths}. An unlimited "
            f"cache would hit {described['hit']:.1%} of the input tokens.\n\nA block of "
            f"{BLOCK_TOKENS} tokens "
            f"became {fleet['block_tokens']}, answers {fleet['answers'] or 1:g} of their length; "
            f"{trace['left_out']} requests too long for the fleet were left out. There are "
            f"{sent:,} requests{f' (requested: {asked:,})' if asked not in (None, sent) else ''} "
            f"with {trace['prompt_tokens']:,} prompt and {trace['output_tokens']:,} answer tokens, "
            f"the largest of {trace['largest_tokens']:,}."
        )
    think = "its recorded gap" if load["think_s"] is None else f"{load['think_s']:g} s"
    return (
        f"{text} The next turn is sent {think} after the previous answer. A failed request counts "
        f"as {load['timeout_s']:g} s."
    )
