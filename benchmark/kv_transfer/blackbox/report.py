"""From measured requests to a JSON line each, two tables and a plot, by length of the prompt."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec
from rich.console import Console

from benchmark.harness.report import percentile, print_table
from benchmark.kv_transfer.blackbox.stages import RoomStages


@dataclass(frozen=True)
class Asked:
    """One request: what the client saw, and its room's stages."""

    label: str
    tokens: int
    """Length of the prompt."""
    again: bool
    """The same prompt had just been answered."""
    ttft_s: float
    cached_tokens: int
    """Prompt tokens that prefill had, as it tells the client."""
    stages: RoomStages


TITLES = {False: "A new prompt", True: "The same prompt again"}
"""By ``Asked.again``."""

Value = Callable[[RoomStages], float | None]

STAGES: dict[str, Value] = {
    "bootstrap": lambda room: room.bootstrap_s,
    "queue": lambda room: room.last.queue_s if room.last else None,
    "build": lambda room: room.last.build_s if room.last else None,
    "post": lambda room: room.last.post_s if room.last else None,
    "wire": lambda room: room.last.wire_s if room.last else None,
    "notice": lambda room: room.notice_s,
}
"""What the transfer adds to a request; together with ``prefill`` they make the whole way."""


def without_prefill(room: RoomStages) -> float | None:
    """Seconds of the way that are not prefill's computing, and waiting for it."""
    if room.total_s is None or room.prefill_s is None:
        return None
    return room.total_s - room.prefill_s


def gigabytes_per_s(room: RoomStages) -> float | None:
    """Bytes of all chunks (10^9) over the seconds from posting them until they were there.

    Posting counts, because that is where NIXL copies between processes of one host.
    """
    seconds = room.whole.post_s + room.whole.wire_s if room.whole else 0.0
    return room.whole.bytes / seconds / 1e9 if room.whole and seconds > 0 else None


def median(rooms: Sequence[RoomStages], value: Value) -> float:
    """Over the rooms that have the value; NaN where none has it."""
    return percentile([v for v in map(value, rooms) if v is not None], 50)


def write_lines(path: Path, asked: Sequence[Asked]) -> None:
    """A JSON line a request; replaces what was there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(msgspec.json.encode(asdict(a)) + b"\n" for a in asked))


def table(asked: Sequence[Asked]) -> list[list[str]]:
    """A column a size, headed by it, and a row a quantity; medians, times in milliseconds.

    ``asked`` are of one kind, first or again.
    """
    sizes = {size: [a.stages for a in of_size] for size, of_size in by_size(asked).items()}

    def row(name: str, value: Value, cell: Callable[[float], str]) -> list[str]:
        return [name, *(cell(median(rooms, value)) for rooms in sizes.values())]

    return [
        ["prompt, tokens", *(f"{size:,}" for size in sizes)],
        row("tokens in tree", lambda room: room.prefix_tokens, count),
        row("moved, KiB", _kibibytes, count),
        row("chunks", lambda room: room.chunks, count),
        *(row(name, value, milliseconds) for name, value in STAGES.items()),
        row("all of these", without_prefill, milliseconds),
        ["the slowest", *(milliseconds(slowest(rooms)) for rooms in sizes.values())],
        row("prefill", lambda room: room.prefill_s, milliseconds),
        row("all chunks", _whole_seconds, milliseconds),
        row("GB/s", gigabytes_per_s, two_digits),
    ]


def print_stages(title: str, asked: Sequence[Asked], console: Console) -> None:
    """The table for a terminal."""
    head, *rows = table(asked)
    print_table(f"{title}; p50, milliseconds", head, rows, console)


def write_markdown(path: Path, intro: str, asked: Sequence[Asked]) -> None:
    """The tables of both kinds, for reading where the run is not at hand."""
    parts = [intro]
    for again, title in TITLES.items():
        head, *rows = table([a for a in asked if a.again == again])
        lines = [head, ["---"] * len(head), *rows]
        parts.append(f"## {title}")
        parts.append("\n".join(f"| {' | '.join(cells)} |" for cells in lines))
    path.write_text("\n\n".join(parts) + "\n")


def slowest(rooms: Sequence[RoomStages]) -> float:
    """The longest way without prefill, seconds; NaN where none is known."""
    known = [v for v in map(without_prefill, rooms) if v is not None]
    return max(known, default=math.nan)


def _kibibytes(room: RoomStages) -> float | None:
    return room.whole.bytes / 2**10 if room.whole else None


def _whole_seconds(room: RoomStages) -> float | None:
    return room.whole.seconds if room.whole else None


def draw(path: Path, asked: Sequence[Asked]) -> None:
    """Writes a PNG: each stage's median against the prompt's length. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")  # no display
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4), sharex=True, sharey=True)
    lines: dict[str, Value] = {**STAGES, "without prefill": without_prefill}
    for axis, again in zip(axes, (False, True), strict=True):
        sizes = by_size([a for a in asked if a.again == again])
        for name, value in lines.items():
            points = [median([a.stages for a in s], value) * 1e3 for s in sizes.values()]
            total = name == "without prefill"
            style = {"color": "black", "linewidth": 2} if total else {"linewidth": 1}
            axis.plot(list(sizes), points, marker="o", markersize=3, label=name, **style)
        axis.set_xscale("log", base=2)
        axis.set_yscale("symlog", linthresh=0.01)  # notice may be below zero
        axis.set_title(TITLES[again], fontsize=10)
        axis.set_xlabel("prompt, tokens")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("p50, ms (less is better)")
    axes[0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def by_size(asked: Sequence[Asked]) -> dict[int, list[Asked]]:
    """Prompt length -> its requests, shortest first."""
    sizes = sorted({a.tokens for a in asked})
    return {size: [a for a in asked if a.tokens == size] for size in sizes}


def count(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:,.0f}"


def two_digits(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.2f}"


def milliseconds(seconds: float) -> str:
    """Three significant digits, as stages differ by factors of thousands."""
    return "-" if math.isnan(seconds) else f"{float(f'{seconds * 1e3:.3g}'):,g}"
