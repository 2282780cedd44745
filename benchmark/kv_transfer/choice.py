"""What describing one chunk costs by ranges and by prepared lists, and the constants by which
``delta/nixl/descriptors.py`` is to choose on this machine: ``choice``.

The arrays are made by the patch set's own functions; ``measure`` runs in the prefill process of the
bare arm.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from benchmark.harness.report import markdown, print_table, solve
from benchmark.kv_transfer.bare_nixl import memory
from benchmark.kv_transfer.cases import Options
from benchmark.kv_transfer.fleet import Fleet
from benchmark.kv_transfer.patterns import Pages, runs_for
from benchmark.kv_transfer.pool import Pool
from benchmark.kv_transfer.records import FleetConfig, Peer
from benchmark.kv_transfer.shapes import Shape

FORMS = ("ranges", "prepared")
#: 512 bytes a token in one buffer, so that descriptors weigh and bytes do not.
_SHAPE = Shape("choice", layers=64, kv_heads=1, head_dim=256, dtype_bytes=2, mla=False)
_POOL_PAGES = 2049
_BUFFERS = (16, 64, 128)
_PAGES = (16, 64, 256, 1024)
_RUNS = (1, 2, 4, 16, 64, 256)
_PAUSE_S = 20e-6


@dataclasses.dataclass(frozen=True)
class Chunk:
    """A page list: ``pages`` pages in runs of ``run`` in each of ``buffers`` buffers."""

    buffers: int
    pages: int
    run: int

    def entries(self, form: str) -> int:
        """Descriptors that are handed to the library: runs or pages, in every buffer."""
        return self.buffers * (self.pages // self.run if form == "ranges" else self.pages)


@dataclasses.dataclass(frozen=True)
class Cost:
    """One chunk in one form. Microseconds."""

    build: float
    #: Post and wire, until it is seen done.
    move: float


#: By form and chunk; medians.
Table = Mapping[tuple[str, Chunk], Cost]


@dataclasses.dataclass(frozen=True)
class Constants:
    """Microseconds: a fixed part, and one for each descriptor; by form."""

    ranges_fixed: float
    ranges_each: float
    prepared_fixed: float
    prepared_each: float

    def __str__(self) -> str:
        values = ",".join(f"{value:.3g}" for value in dataclasses.astuple(self))
        return f"SGLANG_DISAGGREGATION_DESCRIPTOR_COSTS={values}"


def fit(table: Table) -> Constants:
    """What a chunk costs to build.

    Least squares of relative errors, nothing below zero. A chunk by ranges costs a fixed part and
    ``a`` for each run; by prepared lists a fixed part, ``b`` for each page, and ``c`` for each run,
    since the library merges neighbours itself and keeps one record a run. What both forms pay for a
    run cancels out in the choice: ``ranges_each`` is ``a - c``.
    """
    chunks = [chunk for form, chunk in table if form == "ranges"]
    fixed_r, each_r = solve(
        [[1.0, chunk.entries("ranges")] for chunk in chunks],
        [table["ranges", chunk].build for chunk in chunks],
    )
    fixed_p, each_p, run_p = solve(
        [[1.0, chunk.entries("prepared"), chunk.entries("ranges")] for chunk in chunks],
        [table["prepared", chunk].build for chunk in chunks],
    )
    return Constants(fixed_r, max(each_r - run_p, 0.0), fixed_p, each_p)


def judge(constants: Constants, table: Table) -> tuple[int, int, float]:
    """Of all chunks, how many are built the cheaper way by these constants, how many there are, and
    how much dearer the choice is than always the cheaper way, as a share."""
    right, chosen_sum, best_sum = 0, 0.0, 0.0
    chunks = [chunk for form, chunk in table if form == "ranges"]
    for chunk in chunks:
        ranges, lists = (table[form, chunk].build for form in FORMS)
        by_ranges = constants.ranges_fixed + constants.ranges_each * chunk.entries("ranges")
        by_lists = constants.prepared_fixed + constants.prepared_each * chunk.entries("prepared")
        chosen, best = ranges if by_ranges <= by_lists else lists, min(ranges, lists)
        right += chosen == best
        chosen_sum, best_sum = chosen_sum + chosen, best_sum + best
    return right, len(chunks), chosen_sum / best_sum - 1


def run(options: Options) -> list[str]:
    """Measures, fits, prints; the parts of the page."""
    chunks = [
        Chunk(buffers, pages, run)
        for buffers in _BUFFERS
        for pages in _PAGES
        for run in _RUNS
        if run <= pages
    ]
    config = FleetConfig(
        arm="bare",
        backend="nixl",
        shape=_SHAPE,
        page_size=1,
        pool_pages=_POOL_PAGES,
        slots=1,
        transport=options.transport,
        device=options.device,
    )
    repeats = options.rounds * options.passes
    options.console.print(f"{len(chunks)} page lists, {repeats} times in each form")
    with Fleet(config) as fleet:
        table: Table = fleet.ask(0, "forms", chunks, repeats, patience_s=300.0)
    columns = ["buffers", "pages", "runs of", "descriptors: ranges", "prepared"]
    columns += ["build us: ranges", "prepared", "post + wire us: ranges", "prepared"]
    rows = [
        [str(chunk.buffers), str(chunk.pages), str(chunk.run)]
        + [f"{chunk.entries(form):,}" for form in FORMS]
        + [f"{table[form, chunk].build:,.0f}" for form in FORMS]
        + [f"{table[form, chunk].move:,.0f}" for form in FORMS]
        for chunk in chunks
    ]
    print_table("one chunk, medians", columns, rows, options.console)
    constants = fit(table)
    right, of, dearer = judge(constants, table)
    move = median(table["prepared", c].move / table["ranges", c].move for c in chunks)
    said = (
        f"`{constants}`, from the time to build: with them {right} of {of} page lists are built "
        f"the cheaper way, and all together take {100 * dearer:.1f} % longer than if all were. "
        f"Post and wire by prepared lists over those by ranges, median of all page lists: "
        f"{move:.2f}. (NIXL merges neighbours of a prepared list itself.)"
    )
    options.console.print(said)
    options.lines.append({"kind": "constants", **dataclasses.asdict(constants)})
    return [markdown(columns, rows), said]


# ---- in the prefill process ----


def measure(agent: Any, pool: Pool, peer: Peer, chunks: Sequence[Chunk], repeats: int) -> Table:
    """Every chunk in every form, in turn, ``repeats`` times after one that is not counted."""
    seen: dict[tuple[str, Chunk], list[Cost]] = {
        (form, chunk): [] for chunk in chunks for form in FORMS
    }
    for buffers in sorted({chunk.buffers for chunk in chunks}):
        forms = _Forms(agent, pool, peer, buffers)
        for chunk in chunks:
            for number in range(repeats + 1) if chunk.buffers == buffers else ():
                source = runs_for(chunk.pages, chunk.run, 2 * number)
                destination = runs_for(chunk.pages, chunk.run, 2 * number + 1)
                for form in FORMS:
                    cost = forms.move(form, source, destination)
                    if number:
                        seen[form, chunk].append(cost)
        forms.release()
    return {
        key: Cost(median(cost.build for cost in of), median(cost.move for cost in of))
        for key, of in seen.items()
    }


class _Forms:
    """Both sides' pools, cut to some buffers, and their prepared lists."""

    def __init__(self, agent: Any, pool: Pool, peer: Peer, buffers: int) -> None:
        from sglang.srt.disaggregation.delta.nixl import descriptors

        self._agent, self._peer, self._make = agent, peer, descriptors
        self._memory = memory(pool.device)
        self._sides = [
            descriptors.Pool(
                tuple(bases[:buffers]), (pool.item_len,) * buffers, pool.pages, 0, None
            )
            for bases in (pool.bases, peer.bases)
        ]
        self._lists = [
            agent.prep_xfer_dlist(name, descriptors.prepared_strided(side), self._memory)
            for name, side in zip(("", peer.name), self._sides, strict=True)
        ]

    def release(self) -> None:
        """Give the prepared lists back."""
        for each in self._lists:
            self._agent.release_dlist_handle(each)

    def move(self, form: str, source: Pages, destination: Pages) -> Cost:
        """One transfer, and what it cost."""
        began = time.perf_counter()
        make = self._by_ranges if form == "ranges" else self._by_lists
        handle = make(source, destination)
        built = time.perf_counter()
        state = self._agent.transfer(handle)
        while state == "PROC":
            time.sleep(_PAUSE_S)
            state = self._agent.check_xfer_state(handle)
        ended = time.perf_counter()
        self._agent.release_xfer_handle(handle)
        if state != "DONE":
            raise RuntimeError(f"NIXL ended a transfer by {form} with {state}")
        return Cost(1e6 * (built - began), 1e6 * (ended - built))

    def _by_ranges(self, source: Pages, destination: Pages) -> Any:
        runs = self._make.runs_of(source, destination)
        local, remote = self._make.ranges(*self._sides, runs)
        return self._agent.initialize_xfer(
            "WRITE",
            self._agent.get_xfer_descs(local, self._memory),
            self._agent.get_xfer_descs(remote, self._memory),
            self._peer.name,
        )

    def _by_lists(self, source: Pages, destination: Pages) -> Any:
        local = self._make.select(self._sides[0], source)
        remote = self._make.select(self._sides[1], destination)
        return self._agent.make_prepped_xfer("WRITE", self._lists[0], local, self._lists[1], remote)
