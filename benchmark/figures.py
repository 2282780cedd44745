"""``python -m benchmark.figures``: writes the figures of README.md into ``docs/figures``, as SVG.

Every number in them is of the files that benchmarks left in their ``results/`` folders; a test
compares the figures with what these give. SVG is written as text, so that a figure does not depend
on the version of a drawing library.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from benchmark.decode_radix_cache import page as radix_page
from benchmark.harness.models import REPOSITORY
from benchmark.local_turns import page as local_page

FOLDER = REPOSITORY / "docs" / "figures"
RADIX = REPOSITORY / "benchmark/decode_radix_cache/results/throughput.summary.json"
LOCAL = REPOSITORY / "benchmark/local_turns/results/summary.json"

Json = Mapping[str, Any]

#: Arms of both benchmarks -> the name on a figure, and the bar's colour.
ARMS = {
    "stock": ("SGLang, stock", "#9a9a9a"),
    "patched": ("installed, no flag", "#8cc0de"),
    "flag": ("radix cache", "#2a7fb8"),
    local_page.AGGREGATED: ("two aggregated", "#c9b37e"),
    local_page.STOCK: ("SGLang, stock", "#9a9a9a"),
    local_page.REMOTE: ("radix cache", "#2a7fb8"),
    local_page.CHOSEN: ("and local turns", "#55a868"),
}
#: Tokens of a page in the benchmark of local turns.
PAGE = 16


@dataclass
class Svg:
    """Elements of a picture, in the order in which they are drawn. All lengths in pixels."""

    width: int
    height: int
    parts: list[str] = field(default_factory=list)

    def rect(self, x: float, y: float, width: float, height: float, fill: str) -> None:
        self.parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" '
            f'fill="{fill}"/>'
        )

    def line(
        self, *ends: float, color: str = "#333", arrow: bool = False, width: float = 1
    ) -> None:
        x1, y1, x2, y2 = ends
        head = ' marker-end="url(#head)"' if arrow else ""
        self.parts.append(
            f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{color}" '
            f'stroke-width="{width:g}"{head}/>'
        )

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        anchor: str = "start",
        size: int = 12,
        color: str = "#222",
        bold: bool = False,
    ) -> None:
        weight = ' font-weight="bold"' if bold else ""
        self.parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" '
            f'fill="{color}"{weight}>{escape(text)}</text>'
        )

    def __str__(self) -> str:
        body = "\n".join(self.parts)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
            f'width="{self.width}" height="{self.height}" '
            'font-family="Helvetica, Arial, sans-serif">\n'
            '<defs><marker id="head" markerWidth="9" markerHeight="8" refX="8" refY="4" '
            'orient="auto" markerUnits="userSpaceOnUse">'
            '<path d="M0,0 L9,4 L0,8 z" fill="#333"/></marker></defs>\n'
            f'<rect width="{self.width}" height="{self.height}" fill="#ffffff"/>\n{body}\n</svg>\n'
        )


# ---- bars ----

_LEFT, _PANEL, _STEP, _BAR = 132, 205, 17, 12


def _bars(
    svg: Svg,
    top: int,
    title: str,
    runs: Mapping[str, Sequence[Json]],
    shown: Mapping[str, Json],
    panels: Mapping[str, tuple[Callable[[Json], float], str]],
) -> int:
    """A row of panels, an arm a bar; the line through a bar reaches from the smallest to the
    largest of its rounds. Behind it its value, and the ratio to the stock release's. The y below.
    """
    svg.text(12, top, title, bold=True)
    base = next(arm for arm in shown if ARMS[arm][0] == "SGLang, stock")
    for column, (name, (value, form)) in enumerate(panels.items()):
        x = _LEFT + column * _PANEL
        svg.text(x, top + 20, name, color="#555")
        most = max(value(run) for arm in shown for run in runs[arm])
        scale = (_PANEL - 92) / most
        for row, arm in enumerate(shown):
            y = top + 28 + row * _STEP
            label, color = ARMS[arm]
            if column == 0:
                svg.text(_LEFT - 8, y + 10, label, anchor="end")
            middle, each = value(shown[arm]), [value(run) for run in runs[arm]]
            low, high = min(each) * scale, max(each) * scale
            svg.rect(x, y, middle * scale, _BAR, color)
            svg.line(x + low, y + _BAR / 2, x + high, y + _BAR / 2, width=1.5)
            for end in (low, high):
                svg.line(x + end, y + 3, x + end, y + _BAR - 3, width=1.5)
            ratio = "" if arm == base else f" ({middle / value(shown[base]):.2f}x)"
            svg.text(x + max(high, middle * scale) + 5, y + 10, f"{middle:{form}}{ratio}", size=11)
    return top + 28 + len(shown) * _STEP + 26


def _ms(of: str, p: str) -> tuple[Callable[[Json], float], str]:
    return lambda run: float(run[of][p]) * 1e3, ",.0f"


def worth() -> str:
    """Throughput and latencies of all arms, those that got worse beside those that got better."""
    radix, local = _read(RADIX), _read(LOCAL)
    svg = Svg(_LEFT + 4 * _PANEL, 380)
    medians = {arm: run["summary"] for arm, run in radix_page.medians(radix).items() if arm in ARMS}
    runs = {arm: [run["summary"] for run in radix["runs"][arm]] for arm in medians}
    load = radix["load"]
    y = _bars(
        svg,
        22,
        f"{load['requests']} requests at once over {load['groups']} prefixes of "
        f"{load['prefix_tokens']:,} tokens, {load['generated_tokens']} output tokens each; "
        f"{len(runs['stock'])} runs, the slower one is shown",
        runs,
        medians,
        {
            "requests/s": (lambda run: float(run["requests_per_s"]), ".2f"),
            "TTFT p50, ms": _ms("ttft_s", "p50"),
            "TTFT p99, ms": _ms("ttft_s", "p99"),
            "inter-token latency p99, ms": _ms("itl_s", "p99"),
        },
    )
    load, most = local["load"], max(local["load"]["cold_clients"])
    for clients in (0, most):
        beside = f"beside {clients} clients with new prompts of {load['cold_tokens']:,} tokens"
        found = local_page.medians(local, clients)
        y = _bars(
            svg,
            y,
            f"{load['talks']} sessions of {load['turns']} turns {beside if clients else 'alone'}; "
            f"median of {local['rounds']} rounds",
            {arm: loads[str(clients)] for arm, loads in local["runs"].items()},
            {arm: found[arm] for arm in found if arm in ARMS},
            {
                "requests/s of the sessions": (lambda run: float(run["requests_per_s"]), ".2f"),
                "TTFT p50 of later turns, ms": _ms("ttft_later_s", "p50"),
                "TTFT p99 of later turns, ms": _ms("ttft_later_s", "p99"),
                "inter-token latency p99, ms": _ms("gap_s", "p99"),
            },
        )
    svg.text(
        12,
        y - 4,
        f"{local['machine'].split(' (')[0]} shared by client and servers, small models, no GPU. "
        "Line: smallest to largest run. 1.00x is the stock release under the same load.",
        size=11,
        color="#555",
    )
    return str(svg)


# ---- two turns ----


def whole_pages(tokens: int) -> int:
    return tokens // PAGE


def pages(tokens: int) -> int:
    """That so many tokens fill, the last one perhaps in part."""
    return -(-tokens // PAGE)


def prompts(load: Json) -> list[int]:
    """Tokens of each turn's prompt: the history with all answers, and the new ones."""
    more = load["answer_tokens"] + load["turn_tokens"]
    return [load["first_tokens"] + more * turn for turn in range(load["turns"])]


def held(load: Json) -> list[int]:
    """Pages of each turn's prompt that decode's tree holds: prompt and answer before it."""
    ends = [tokens + load["answer_tokens"] for tokens in prompts(load)]
    return [0, *(whole_pages(end) for end in ends[:-1])]


def turns() -> str:
    """What crosses the wire in two turns of a session of the benchmark of local turns."""
    load = _read(LOCAL)["load"]
    (first, second), answer, have = prompts(load)[:2], load["answer_tokens"], held(load)[1]
    new = second - have * PAGE
    svg = Svg(820, 436)
    left, right = 250, 570

    def row(y: int, text: str, to_prefill: bool, bold: bool = False) -> None:
        ends = (right - 4, y, left + 4, y) if to_prefill else (left + 4, y, right - 4, y)
        svg.line(*ends, arrow=True, width=3 if bold else 1)
        svg.text((left + right) / 2, y - 6, text, anchor="middle", bold=bold, size=12)

    def note(y: int, prefill: str = "", decode: str = "") -> None:
        svg.text(left - 10, y, prefill, anchor="end")
        svg.text(right + 10, y, decode)

    svg.text(left, 22, "prefill server", anchor="middle", bold=True, size=14)
    svg.text(right, 22, "decode server", anchor="middle", bold=True, size=14)
    svg.line(left, 32, left, 424, color="#888")
    svg.line(right, 32, right, 424, color="#888")

    def turn(y: int, title: str) -> None:
        svg.line(8, y - 12, 812, y - 12, color="#ddd")
        svg.text(12, y + 4, title, bold=True)

    turn(56, f"Turn 1: {first} tokens")
    row(86, "room, 0 tokens held, pages for the rest", True)
    note(90, decode="the tree holds nothing")
    note(116, prefill=f"computes {first} tokens")
    row(116, f"KV of {pages(first)} pages", False, bold=True)
    row(142, "first token, “complete”", False)
    note(146, decode=f"prompt enters the tree; generates {answer}")

    turn(182, f"Turn 2: {second} tokens")
    row(212, f"room, {have * PAGE} tokens held, pages for the rest", True)
    note(216, decode=f"locks {have} pages in the tree")
    note(242, prefill="computes what its cache lacks")
    row(242, f"KV of {pages(second) - have} pages (stock: {pages(second)})", False, bold=True)
    row(268, "first token, “complete”", False)
    note(272, decode=f"generates {answer}")

    turn(308, "The same turn 2, computed by decode")
    row(346, "“computed by decode”", True)
    note(350, decode=f"locks {have} pages in the tree")
    note(376, prefill="answers empty, frees the room", decode=f"computes {new} tokens in chunks")
    svg.text((left + right) / 2, 376, "no KV crosses", anchor="middle", bold=True)
    note(402, decode=f"generates {answer}")
    svg.text(12, 424, f"Pages of {PAGE} tokens.", size=11, color="#555")
    return str(svg)


def _read(path: Path) -> Any:
    return json.loads(path.read_text())


FIGURES: Mapping[str, Callable[[], str]] = {"worth.svg": worth, "two_turns.svg": turns}


def main() -> int:
    """Writes them all, and names those that changed."""
    argparse.ArgumentParser(prog="python -m benchmark figures", description=__doc__).parse_args()
    FOLDER.mkdir(exist_ok=True)
    for name, figure in FIGURES.items():
        path, text = FOLDER / name, figure()
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
            print(path.relative_to(REPOSITORY))
    return 0


if __name__ == "__main__":
    sys.exit(main())
