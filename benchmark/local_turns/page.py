"""The committed summaries as tables and sentences. ``benchmark run local_turns`` measures anew."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from benchmark.harness.report import Verdict, megabytes

Json = Mapping[str, Any]
BOUNDS_MS = (100, 50)

AGGREGATED, STOCK = "two aggregated", "PD, stock"
REMOTE, ALWAYS, CHOSEN = "PD, remote", "PD, always local", "PD, chosen"


def medians(summary: Json, clients: int) -> dict[str, Json]:
    """Arm -> the median over the rounds of each number, beside so many cold clients."""
    return {arm: _median(loads[str(clients)]) for arm, loads in summary["runs"].items()}


def _median(values: Sequence[Any]) -> Any:
    values = [value for value in values if value is not None]
    if values and isinstance(values[0], Mapping):
        names = dict.fromkeys(name for value in values for name in value)
        return {name: _median([value.get(name) for value in values]) for name in names}
    return median(values) if values else None


def _milliseconds(seconds: Sequence[float | None]) -> str:
    if any(each is None for each in seconds):
        return "-"
    return ", ".join(f"{each * 1e3:,.0f}" for each in seconds if each is not None) + " ms"


def _rounds(count: int) -> str:
    return "one round" if count == 1 else f"medians of {count} rounds"


def title(summary: Json, clients: int) -> str:
    """What is sent."""
    load = summary["load"]
    beside = (
        f"beside {clients} client{'s' * (clients > 1)} with cold prompts of "
        f"{load['cold_tokens']:,} tokens"
        if clients
        else "alone"
    )
    return (
        f"{load['talks']} sessions of {load['turns']} turns {beside}, {_rounds(summary['rounds'])}"
    )


def table(summary: Json, clients: int) -> tuple[list[str], list[list[str]]]:
    """Head and rows: a quantity a row, an arm a column."""
    arms = medians(summary, clients)
    runs = {arm: loads[str(clients)] for arm, loads in summary["runs"].items()}

    def times(of: str, *which: str) -> list[str]:
        cells = ([m[of][p] for p in which] for m in arms.values())
        return [_milliseconds(cell) for cell in cells]

    def count(of: str) -> list[str]:
        return [f"{m[of]:,.0f}" for m in arms.values()]

    rows = [
        ["requests/s of the sessions", *(f"{m['requests_per_s']:.2f}" for m in arms.values())],
        [
            "each round",
            *(", ".join(f"{m['requests_per_s']:.2f}" for m in of) for of in runs.values()),
        ],
        ["TTFT of first turns: p50, p99", *times("ttft_first_s", "p50", "p99")],
        ["TTFT of later turns: p50, p99", *times("ttft_later_s", "p50", "p99")],
        ["inter-token latency: p50, p99", *times("gap_s", "p50", "p99")],
        ["end to end: p50", *times("latency_s", "p50")],
        ["computed by prefill, tokens", *count("prefill_tokens")],
        ["computed by decode, tokens", *count("local_tokens")],
        ["KV moved", *(megabytes(m["bytes_moved"]) for m in arms.values())],
        ["failed requests", *count("failed")],
    ]
    if clients:
        rows[-1:-1] = [
            ["cold prompts, tokens answered a second", *count("cold_tokens_per_s")],
            ["TTFT of cold prompts: p50", *times("cold_ttft_s", "p50")],
        ]
    return ["", *arms], rows


def _share(counts: Json, above: str, of: str) -> str:
    """A part of the gaps, with both numbers."""
    all_of = counts[of]
    return f"{counts[above] / all_of:.2%} of {all_of:,.0f}" if all_of else "-"


def _summed(summary: Json, clients: int, of: str) -> dict[str, dict[str, float]]:
    """Arm -> counts by name, over all rounds."""
    return {
        arm: {
            name: sum(run[of][name] for run in loads[str(clients)])
            for name in loads[str(clients)][0][of]
        }
        for arm, loads in summary["runs"].items()
    }


def bounds(summary: Json, clients: int) -> tuple[list[str], list[list[str]]]:
    """The arms of the bound on inter-token latency: its cost, and the gaps that are longer."""
    wanted = ("TTFT", "inter-token", "requests/s", "each play", "cold", "failed")
    head, rows = table(summary, clients)
    rows = [["each play", *row[1:]] if row[0] == "each round" else row for row in rows]
    rows = [row for row in rows if row[0].startswith(wanted)]
    turns = {
        arm: [m["local_turns"] / m["requests"] for m in loads[str(clients)]]
        for arm, loads in summary["runs"].items()
    }
    rows.append(["turns computed by decode", *(f"{median(of):.0%}" for of in turns.values())])
    client, decode = (_summed(summary, clients, of) for of in ("gaps", "decode_gaps"))
    for ms in sorted(BOUNDS_MS):
        above = f"{ms} ms"
        rows.append(
            [
                f"gaps above {above} at the clients",
                *(_share(of, above, "all") for of in client.values()),
            ]
        )
        for name, text in (("chunk", "with a chunk"), ("plain", "without")):
            shares = (_share(of, f"{name} {above}", name) for of in decode.values())
            rows.append([f"on decode, {text}: above {above}", *shares])
    return head, rows


def bounds_kept(summary: Json) -> list[Verdict]:
    """What is claimed of each bound: at most 1 % of the gaps with a chunk are longer; where no
    chunk fits, at most 1 % of all gaps are longer by a chunk; and at most 1 % at the clients."""
    found = []
    for clients in dict.fromkeys(summary["load"]["cold_clients"]):
        client, decode = (_summed(summary, clients, of) for of in ("gaps", "decode_gaps"))
        for ms in BOUNDS_MS:
            arm, above = f"{CHOSEN}, {ms} ms", f"{ms} ms"
            if arm not in client:
                continue
            with_chunk, steps = decode[arm][f"chunk {above}"], decode[arm]["chunk"]
            for text, longer, of in (
                ("gaps with a chunk", with_chunk, steps),
                ("gaps with a chunk, of all on decode,", with_chunk, steps + decode[arm]["plain"]),
                ("all gaps at the clients", client[arm][above], client[arm]["all"]),
            ):
                share = longer / of if of else 0.0
                text = f"{arm}: {text} above {above}: {share:.2%} of {of:,.0f} (at most 1 %)"
                found.append(Verdict(text, share <= 0.01))
    return found


def _claim(text: str, measured: float, bound: float, *, at_least: bool = False) -> Verdict:
    """A bound on a ratio, and what was measured."""
    holds = measured >= bound if at_least else measured <= bound
    word = "at least" if at_least else "at most"
    return Verdict(f"{text}: {measured:.2f} times ({word} {bound:g})", holds)


def claims(summary: Json) -> list[Verdict]:
    """What is claimed of the choice, in the busiest load and in the quiet one, as far as the arms
    for it were measured."""
    load, arms = summary["load"], summary["runs"].keys()
    busiest = max(load["cold_clients"])
    if 0 not in load["cold_clients"] or not {REMOTE, ALWAYS, CHOSEN} <= arms:
        return []
    busy, quiet = medians(summary, busiest), medians(summary, 0)

    def ttft(m: Json) -> float:
        return float(m["ttft_later_s"]["p50"])

    def gap(m: Json) -> float:
        return float(m["gap_s"]["p99"])

    def rate(m: Json) -> float:
        return float(m["requests_per_s"])

    later, computed = "TTFT p50 of later turns", quiet[ALWAYS]["prefill_tokens"]
    chosen, remote, either = busy[CHOSEN], busy[REMOTE], (quiet[REMOTE], quiet[ALWAYS])
    least, most = min(map(ttft, either)), max(map(rate, either))
    first = load["talks"] * load["first_tokens"]
    better = "the better of remote and always local"
    found = [
        _claim(f"busy, {later}: remote over chosen", ttft(remote) / ttft(chosen), 4, at_least=True),
        _claim(
            "busy, requests/s: chosen over remote", rate(chosen) / rate(remote), 1.8, at_least=True
        ),
        _claim("busy, ITL p99: chosen over remote", gap(chosen) / gap(remote), 2),
        _claim(f"quiet, {later}: chosen over {better}", ttft(quiet[CHOSEN]) / least, 1.1),
        _claim(f"quiet, requests/s: {better} over chosen", most / rate(quiet[CHOSEN]), 1.1),
        _claim(
            "quiet, always local: tokens that prefill computed over those of first turns",
            computed / first,
            1,
        ),
    ]
    if AGGREGATED in arms:
        over = gap(busy[AGGREGATED]) / gap(chosen)
        found.append(_claim("busy, ITL p99: two aggregated over chosen", over, 10, at_least=True))
    return found
