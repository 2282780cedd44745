"""Sections of the page that only some runs have: by worker, a transfer's stages, prefill events."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmark.agentic.studies.events import Events, events
from benchmark.agentic.studies.numbers import STAGES, Level
from benchmark.agentic.studies.record import Run
from benchmark.agentic.studies.verdict import seconds


def details(run: Run, levels: Sequence[Level]) -> Iterator[str]:
    """Headings, sentences and tables."""
    if rows := list(_events(run, levels)):
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
        yield table([*columns, "of their seconds", "gained / paid"], rows)
    if rows := list(_workers(run, levels)):
        yield "## By worker"
        yield (
            "Busiest first, the mean of the rounds: share of the prompt tokens, and what its cache "
            "held of them. Imbalance is the busiest worker's share over an even one."
        )
        yield table(["load", "arm", "prompt tokens", "hit rate", "imbalance"], rows)
    if rows := list(_stages(run, levels)):
        yield "## Stages of a transfer"
        yield (
            "Of a chunk to one decode server, means: from submission until a worker takes it up, "
            "making its descriptors, the transport's calls that start it, and from then until it "
            "was seen to be over. The stock release counts none."
        )
        yield table(["load", "arm", "transfers", *STAGES], rows)


def _events(run: Run, levels: Sequence[Level]) -> Iterator[list[str]]:
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


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines)
