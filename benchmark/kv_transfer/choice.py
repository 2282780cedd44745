"""Merged ranges, prepared lists, or strided prepared lists: what each costs, and the constants
that it suggests for ``delta/nixl/descriptors.py``."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from statistics import median

import numpy as np

from benchmark.harness.report import print_table
from benchmark.kv_transfer.cases import Options
from benchmark.kv_transfer.fleet import Fleet, FleetConfig
from benchmark.kv_transfer.forms import FORMS, Chunk, Cost
from benchmark.kv_transfer.output import Lines, markdown
from benchmark.kv_transfer.runs import Answer
from benchmark.kv_transfer.shapes import Shape

#: 512 bytes a token in one buffer, so that descriptors weigh and bytes do not.
_SHAPE = Shape("choice", layers=64, kv_heads=1, head_dim=256, dtype_bytes=2, mla=False)
_POOL_PAGES = 2049
_BUFFERS = (16, 64, 128)
_PAGES = (16, 64, 256, 1024)
_RUNS = (1, 2, 4, 16, 64, 256)
#: Half the heads of a token, as between unequal tensor parallel sizes: buffers, and tokens.
_HALVES = ((128, 64), (128, 1024))


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


@dataclasses.dataclass(frozen=True)
class Medians:
    """One chunk in one form, microseconds."""

    build: float
    #: Post and wire, until it is seen done.
    move: float


#: By form and chunk.
Table = Mapping[tuple[str, Chunk], Medians]


def entries(form: str, chunk: Chunk) -> int:
    """Descriptors that are handed to the library: runs or pages, in every buffer."""
    merges = form == "ranges" and not chunk.is_half
    return chunk.buffers * (chunk.pages // chunk.run if merges else chunk.pages)


def fit(table: Table, prepared: str = "strided") -> Constants:
    """What a chunk costs to build; ``prepared``: the form that stands for prepared lists.

    Least squares of relative errors, nothing below zero. A chunk by ranges costs a fixed part and
    ``a`` for each run; by prepared lists a fixed part, ``b`` for each page, and ``c`` for each run,
    since the library merges neighbours itself and keeps one record a run. What both forms pay for a
    run cancels out in the choice: ``ranges_each`` is ``a - c``.
    """
    fixed_r, each_r = _solve(
        [([1.0, entries("ranges", chunk)], found.build)
         for (form, chunk), found in table.items() if form == "ranges"]
    )  # fmt: skip
    fixed_p, each_p, run_p = _solve(
        [([1.0, entries(form, chunk), entries("ranges", chunk)], found.build)
         for (form, chunk), found in table.items() if form == prepared]
    )  # fmt: skip
    return Constants(fixed_r, max(each_r - run_p, 0.0), fixed_p, each_p)


def _solve(rows: Sequence[tuple[Sequence[float], float]]) -> list[float]:
    from scipy.optimize import nnls

    matrix = np.array([[value / cost for value in row] for row, cost in rows])
    scale = np.abs(matrix).max(axis=0)
    solution, _ = nnls(matrix / scale, np.ones(len(rows)))
    return [float(value) for value in solution / scale]


def judge(constants: Constants, table: Table, prepared: str = "strided") -> tuple[int, int, float]:
    """Of all chunks, how many are built the cheaper way by these constants, how many there are, and
    how much dearer the choice is than always the cheaper way, as a share."""
    right, chosen_sum, best_sum = 0, 0.0, 0.0
    chunks = [chunk for form, chunk in table if form == "ranges"]
    for chunk in chunks:
        ranges, lists = table["ranges", chunk].build, table[prepared, chunk].build
        by_ranges = constants.ranges_fixed + constants.ranges_each * entries("ranges", chunk)
        by_lists = constants.prepared_fixed + constants.prepared_each * entries(prepared, chunk)
        chosen, best = ranges if by_ranges <= by_lists else lists, min(ranges, lists)
        right += chosen == best
        chosen_sum, best_sum = chosen_sum + chosen, best_sum + best
    return right, len(chunks), chosen_sum / best_sum - 1


def run(options: Options, lines: Lines) -> Answer:
    """Measure, fit, print."""
    chunks = [
        Chunk(buffers, pages, run)
        for buffers in _BUFFERS
        for pages in _PAGES
        for run in _RUNS
        if run <= pages
    ]
    halves = [Chunk(buffers, tokens, 16, is_half=True) for buffers, tokens in _HALVES]
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
    costs: list[Cost]
    with Fleet(config) as fleet:
        costs, prepared_s = fleet.ask(0, "forms", chunks + halves, repeats, patience_s=300.0)
    table, of_halves = {}, {}
    for form in FORMS:
        for chunk in chunks + halves:
            found = [cost for cost in costs if cost.form == form and cost.chunk == chunk]
            (of_halves if chunk.is_half else table)[form, chunk] = Medians(
                1e6 * median(cost.build_s for cost in found),
                1e6 * median(cost.post_s + cost.wire_s for cost in found),
            )
    for cost in costs:
        lines.write({"kind": "form", **dataclasses.asdict(cost)})
    columns = ["buffers", "pages", "runs of", "descriptors: ranges", "prepared"]
    columns += [f"build us: {FORMS[0]}", *FORMS[1:], f"post + wire us: {FORMS[0]}", *FORMS[1:]]
    rows = [_row(table, chunk) for chunk in chunks]
    print_table("one chunk, medians", columns, rows, options.console)
    half_rows = [_row(of_halves, chunk) for chunk in halves]
    print_table("half the heads of each token, medians", columns, half_rows, options.console)
    constants = fit(table)
    right, of, dearer = judge(constants, table)
    half_right, half_of, half_dearer = judge(constants, of_halves)
    lines.write({"kind": "constants", **dataclasses.asdict(constants)})
    move = median(table["strided", c].move / table["ranges", c].move for c in chunks)
    times = ", ".join(f"{form} {1e3 * seconds:.1f} ms" for form, seconds in prepared_s.items())
    said = [
        f"Post and wire by strided lists over those by ranges, median of all page lists: "
        f"{move:.2f}. (NIXL merges neighbours of a prepared list itself.)",
        f"Preparing both sides' lists of {max(_BUFFERS) * _POOL_PAGES:,} entries, once a peer: "
        f"{times}.",
        f"`{constants}`, from the time to build: with them {right} of {of} page lists are built "
        f"the cheaper way, and all together take {100 * dearer:.1f} % longer than if all were. Of "
        f"the {half_of} with half the heads of each token {half_right} are built the cheaper way "
        f"({100 * half_dearer:.1f} % longer).",
    ]
    for text in said:
        options.console.print(text)
    halved = ["Half the heads of each token:", markdown(columns, half_rows)]
    return Answer([markdown(columns, rows), *halved, *said])


def _row(table: Table, chunk: Chunk) -> list[str]:
    row = [str(chunk.buffers), str(chunk.pages), str(chunk.run)]
    row += [f"{entries(form, chunk):,}" for form in FORMS[:2]]
    row += [f"{table[form, chunk].build:,.0f}" for form in FORMS]
    return row + [f"{table[form, chunk].move:,.0f}" for form in FORMS]
