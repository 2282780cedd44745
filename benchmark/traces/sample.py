"""Survey of the blocks that sessions share, and a sample of sessions that keeps the sharing.

A block's id must identify all blocks before it as well (see ``Record``). Then a prefix cache
without limits hits exactly the blocks that were seen before. Ids that are reached by different
prefixes are counted (``inconsistent``), because such a trace's figures would be too good.

A sample takes the sessions that **begin** in a window, each with all its requests, even those after
the window: a session cut in two would begin with a long prompt that no earlier turn explains. The
load therefore rises at the window's start, and a few long sessions follow its end. Sharing with
requests before the window is lost.

Then the sample is thinned by families: sessions that share a prefix are kept or dropped together,
by a hash, so that a smaller ratio keeps a subset of a larger one. Thinning by sessions would
separate sharing sessions: in families of two, at a ratio of 0.25, three of four kept sessions would
have lost their partner. The price is that a sample's size varies more, as there are fewer families.

Memory: 8 bytes an occurrence of a block and 36 a request. Every figure is a sum over blocks, so
they are counted in parts of about ``PART`` occurrences, one after the other.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b

import msgspec
import numpy as np
import numpy.typing as npt
import pandas as pd

from benchmark.traces.record import BLOCK_TOKENS, Record

PART = 1 << 22
"""Approximate number of block occurrences that are counted at once."""
FEW = 32
"""Maximum sessions of a block that belongs to a family; with more sessions a block is popular."""

U64 = npt.NDArray[np.uint64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Survey:
    """A trace without its blocks. An occurrence is one block of one prompt; the last block may be
    partial."""

    requests: pd.DataFrame
    """In the trace's order: ``session`` (its key), ``time_ms``, ``input_tokens``,
    ``output_tokens``."""
    sessions: pd.DataFrame
    """By key: ``begins_s``, ``turns``, and ``family``. The first prompts of a family's sessions
    have the same deepest block among the blocks that 2 to ``FEW`` sessions use. A session without
    such a block is a family of its own."""
    blocks: Mapping[str, int]
    """Numbers of occurrences: ``occurrences`` (all), ``distinct`` (first ones), ``repeated`` (of
    blocks that occur more than once), ``shared`` (of blocks that more than one session uses, the
    first occurrence and those within one session included) and ``inconsistent`` (behind another
    block than the first occurrence of the id); and tokens: ``within_tokens`` of blocks that their
    own session had used before, ``across_tokens`` of blocks that only other sessions had used."""


@dataclass(frozen=True)
class Plan:
    """Options of a sample. Errors name the command line's flags."""

    window_s: float = 600.0
    window_start_s: float | None = None
    """Since the trace's first request; None for the densest window."""
    ratio: float = 0.25
    max_single_turn: float = 1.0
    seed: int = 42

    def __post_init__(self) -> None:
        start = self.window_start_s
        for flag, value, right, must in (
            ("--window-seconds", self.window_s, self.window_s > 0, "more than 0"),
            ("--window-start", start, start is None or start >= 0, "0 or more"),
            ("--sample-ratio", self.ratio, 0 < self.ratio <= 1, "more than 0, at most 1"),
            (
                "--max-single-turn-ratio",
                self.max_single_turn,
                0 <= self.max_single_turn <= 1,
                "0 to 1",
            ),
        ):
            if not right:
                raise ValueError(f"{flag} must be {must}: {value:g}")


@dataclass(frozen=True)
class Selection:
    sessions: frozenset[int]
    """Keys of the sessions to keep."""
    start_s: float
    """Time in the trace that becomes 0, seconds."""
    requests: int
    dropped: int = 0
    """Sessions of a single turn that were dropped to limit their share."""


def session_key(record: Record) -> int:
    """Return 64 bits for a session's name, the same in every process.

    The probability that two of a million sessions share a key is one in 37 million.

    Raises:
        ValueError: the record names no session.
    """
    if record.session_id is None:
        raise ValueError("a request without session_id: annotate the trace first")
    return int.from_bytes(blake2b(record.session_id.encode(), digest_size=8).digest(), "little")


def mixed(values: U64, seed: int = 0) -> U64:
    """Return the values spread evenly over 64 bits (splitmix64), in another way for each seed."""
    x = values + np.uint64((0x9E3779B97F4A7C15 * (2 * seed + 1)) % 2**64)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def draws(keys: U64, seed: int) -> Floats:
    """Return a number in [0, 1) for each key; equal keys give equal numbers."""
    return (mixed(mixed(keys), seed=seed + 16) >> np.uint64(11)).astype(np.float64) / 2.0**53


def survey(records: Iterable[Record]) -> Survey:
    """Return the survey of at least one record, in order of time, all with a session."""
    key, time, tokens_in, tokens_out = array("Q"), array("d"), array("q"), array("q")
    ids = array("Q")
    for record in records:
        key.append(session_key(record))
        time.append(record.timestamp)
        tokens_in.append(record.input_length)
        tokens_out.append(record.output_length)
        ids.extend(record.hash_ids)
    requests = pd.DataFrame(
        {
            "session": np.array(key, np.uint64),
            "time_ms": np.array(time),
            "input_tokens": np.array(tokens_in),
            "output_tokens": np.array(tokens_out),
        }
    )
    figures: Counter[str] = Counter()
    deepest_blocks = []
    for part in _parts(np.array(ids, np.uint64), requests):
        part_figures, deepest = _count(part)
        figures.update(part_figures)
        deepest_blocks.append(deepest)
    # Over all parts, the deepest block of each session's first request.
    anchor = pd.concat(deepest_blocks).sort_values("place").drop_duplicates("request", keep="last")
    anchor = anchor.set_index("request")["block"]
    firsts = requests.drop_duplicates("session")
    family = firsts["session"].copy()
    anchor = anchor[anchor.index.intersection(firsts.index)]
    # Mixed so that ids, which may be small numbers, do not collide with keys of sessions.
    family[anchor.index] = mixed(anchor.to_numpy(), seed=2)
    sessions = pd.DataFrame({"begins_s": firsts["time_ms"] / 1000, "family": family})
    sessions = sessions.set_index(firsts["session"]).sort_index()
    sessions["turns"] = requests["session"].value_counts()
    return Survey(requests, sessions, figures)


def _parts(ids: U64, requests: pd.DataFrame) -> Iterator[pd.DataFrame]:
    """Yield occurrences of blocks in the trace's order, all those of one block in one part.

    Columns: ``block``, ``request``, ``place`` (in the prompt, from 0), ``tokens``, ``session``, and
    ``before``: the id of the previous block, for a prompt's first block a fixed other number.
    """
    lengths = requests["input_tokens"].to_numpy()
    counts = -(-lengths // BLOCK_TOKENS)
    ends = np.cumsum(counts)
    parts = 1 + len(ids) // PART
    part = mixed(ids) % np.uint64(parts)
    for number in range(parts):
        where = np.flatnonzero(part == number)
        request = np.searchsorted(ends, where, side="right")
        place = where - (ends - counts)[request]
        none = mixed(np.zeros(1, np.uint64), seed=1)
        yield pd.DataFrame(
            {
                "block": ids[where],
                "request": request,
                "place": place,
                "tokens": np.minimum(BLOCK_TOKENS, lengths[request] - place * BLOCK_TOKENS),
                "session": requests["session"].to_numpy()[request],
                "before": np.where(place > 0, ids[where - 1], none),
            }
        )


def _count(rows: pd.DataFrame) -> tuple[dict[str, int], pd.DataFrame]:
    """Return a part's figures, and for each request the deepest block that few sessions use."""
    block = rows["block"]
    first, first_of_session = ~rows.duplicated("block"), ~rows.duplicated(["block", "session"])
    users = block.map(block[first_of_session].value_counts())
    before = block.map(rows[first].set_index("block")["before"])
    figures = {
        "occurrences": len(rows),
        "distinct": int(first.sum()),
        "repeated": int(block.duplicated(keep=False).sum()),
        "shared": int((users > 1).sum()),
        "within_tokens": int(rows["tokens"][~first_of_session].sum()),
        "across_tokens": int(rows["tokens"][first_of_session & ~first].sum()),
        "inconsistent": int((rows["before"] != before).sum()),
    }
    few = rows.loc[users.between(2, FEW), ["request", "place", "block"]]
    return figures, few.drop_duplicates("request", keep="last")


def window_and_thin(trace_survey: Survey, plan: Plan) -> Selection:
    """Return the sessions that begin in the window, thinned by families.

    Then the share of single-turn sessions is limited: of these, the smallest draws are kept.

    Raises:
        ValueError: no session is left.
    """
    time_ms = trace_survey.requests["time_ms"].to_numpy()
    zero = float(time_ms[0]) / 1000
    start = densest(time_ms, plan.window_s)
    if plan.window_start_s is not None:
        start = zero + plan.window_start_s
    begins = trace_survey.sessions["begins_s"]
    inside = trace_survey.sessions[(begins >= start) & (begins < start + plan.window_s)]
    if inside.empty:
        raise ValueError(
            f"no session begins in the {plan.window_s:g} s from {start - zero:g} s on "
            "(--window-start, --window-seconds)"
        )
    inside = inside.assign(draw=draws(inside["family"].to_numpy(), plan.seed))
    inside = inside[inside["draw"] < plan.ratio]
    kept = len(inside)
    if plan.max_single_turn < 1:
        several = inside[inside["turns"] > 1]
        # The small addition prevents that an exact integer is rounded down.
        cap = plan.max_single_turn / (1 - plan.max_single_turn)
        room = int(len(several) * cap + 1e-9)
        single = inside[inside["turns"] == 1].sort_values("draw", kind="stable")
        inside = pd.concat([several, single[:room]])
    if inside.empty:
        raise ValueError(
            f"--sample-ratio {plan.ratio:g} with --max-single-turn-ratio "
            f"{plan.max_single_turn:g} leaves no session of the window"
        )
    dropped = kept - len(inside)
    return Selection(frozenset(inside.index), start, int(inside["turns"].sum()), dropped)


def random_requests(trace_survey: Survey, requests: int, seed: int) -> Selection:
    """Return whole random sessions, as few as have ``requests`` requests."""
    keys = trace_survey.sessions.index.to_numpy()
    turns = trace_survey.sessions["turns"].iloc[np.argsort(draws(keys, seed), kind="stable")]
    enough = turns[: int(np.searchsorted(turns.cumsum(), requests)) + 1]
    start = float(trace_survey.requests["time_ms"].iloc[0]) / 1000
    return Selection(frozenset(enough.index), start, int(enough.sum()))


def chosen(records: Iterable[Record], selection: Selection) -> Iterator[Record]:
    """Yield the requests of the selection's sessions, with times from its start."""
    for record in records:
        if session_key(record) in selection.sessions:
            # Clipped at 0, because rounding must not make a record that the reader refuses.
            time_ms = max(0.0, record.timestamp - selection.start_s * 1000)
            yield msgspec.structs.replace(record, timestamp=round(time_ms, 3))


def densest(time_ms: Floats, seconds: float) -> float:
    """Return the start of the window of ``seconds`` with the most requests, the earliest of equal
    ones, in seconds on the clock of ``time_ms``. The window lies within the trace, unless the trace
    is shorter.

    ``time_ms``: times of requests, ascending.
    """
    length = seconds * 1000
    fits = time_ms[time_ms + length <= max(time_ms[-1], time_ms[0] + length)]
    inside = np.searchsorted(time_ms, fits + length, side="left") - np.searchsorted(time_ms, fits)
    return float(fits[np.argmax(inside)]) / 1000
