"""Session, time and lengths of every request of a trace, as arrays: 24 bytes a request."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from benchmark.traces.record import Record

U64 = npt.NDArray[np.uint64]
Places = npt.NDArray[np.intp]


def session_key(record: Record) -> int:
    """64 bits for a session's name, the same in every process.

    Two sessions of a trace of a million share a key with a chance of one in 37 million.

    Raises:
        ValueError: the record names no session.
    """
    if record.session_id is None:
        raise ValueError("a request without session_id: annotate the trace first")
    return int.from_bytes(blake2b(record.session_id.encode(), digest_size=8).digest(), "little")


def mixed(values: U64, seed: int = 0) -> U64:
    """Values spread evenly over 64 bits (splitmix64); other seeds, other values."""
    x = values + np.uint64((0x9E3779B97F4A7C15 * (2 * seed + 1)) % 2**64)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@dataclass(frozen=True)
class Columns:
    """A trace without its blocks; every array has one entry a request, in the trace's order."""

    key: U64
    """``session_key`` of its session."""
    time_ms: npt.NDArray[np.float64]
    input_tokens: npt.NDArray[np.uint32]
    output_tokens: npt.NDArray[np.uint32]

    @cached_property
    def _unique(self) -> tuple[U64, Places, Places, Places]:
        return np.unique(self.key, return_index=True, return_inverse=True, return_counts=True)

    @property
    def sessions(self) -> U64:
        """Keys of all sessions, ascending."""
        return self._unique[0]

    @property
    def first(self) -> Places:
        """For each of ``sessions`` its first request."""
        return self._unique[1]

    @property
    def session(self) -> Places:
        """For each request the place of its session in ``sessions``."""
        return self._unique[2]

    @property
    def turns(self) -> Places:
        """For each of ``sessions`` its number of requests."""
        return self._unique[3]


class ColumnsBuilder:
    """Columns, one record at a time."""

    def __init__(self) -> None:
        self._key = array("Q")
        self._time = array("d")
        self._input = array("I")
        self._output = array("I")

    def add(self, record: Record) -> None:
        self._key.append(session_key(record))
        self._time.append(record.timestamp)
        self._input.append(record.input_length)
        self._output.append(record.output_length)

    def build(self) -> Columns:
        return Columns(
            np.array(self._key, np.uint64),
            np.array(self._time, np.float64),
            np.array(self._input, np.uint32),
            np.array(self._output, np.uint32),
        )
