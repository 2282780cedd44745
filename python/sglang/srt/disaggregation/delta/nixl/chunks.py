"""One chunk of a room as NIXL workers get it: what goes from where to where, and nothing live."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from sglang.srt.disaggregation.delta.pages import DeltaMismatch

#: Page indices into a pool, 1-D int32; read-only where it is ours.
Pages = npt.NDArray[np.int32]


class Destination(msgspec.Struct, frozen=True, eq=False):
    """Where a chunk goes at one decode rank."""

    pages: Pages
    #: Pages of the state that goes with the last chunk.
    state_pages: tuple[int, ...]
    metadata_slot: int
    #: Pages of its pool and slots of its metadata; None where it did not say (a stock peer).
    pool_pages: int | None
    metadata_slots: int | None
    #: It takes the metadata in the note that completes the room, and its slot is not written to.
    takes_metadata: bool = False


class Load(msgspec.Struct, frozen=True, eq=False):
    """The payload of an ``transfer_backend.Chunk``."""

    chunk_id: int
    pages: Pages
    #: With the last chunk only.
    metadata_slot: int | None
    state_pages: tuple[int, ...]
    #: By the name of the peer.
    destinations: dict[str, Destination]


def load(
    room: int,
    announcements: Iterable[Any],
    pages: npt.NDArray[Any],
    index_slice: slice,
    chunk_id: int,
    metadata_slot: int | None,
    state_pages: Sequence[Any] | None,
) -> Load:
    """Cut one chunk out of what the decode ranks of ``room`` announced.

    ``pages`` are copied: SGLang's may be a view of its own table, which changes while the chunk is
    in a queue. ``index_slice`` is the chunk's place among the room's destination pages.

    Raises:
        DeltaMismatch: a rank listed another number of pages there.
    """
    own = np.array(pages, dtype=np.int32)
    own.setflags(write=False)
    destinations = {}
    for info in announcements:
        if info.is_dummy():
            continue
        listed = info.dst_kv_indices[index_slice]
        if len(listed) != len(own):
            raise DeltaMismatch(
                f"room {room}: chunk {chunk_id} has {len(own)} pages, and decode rank "
                f"{info.agent_name} listed {len(listed)} for it"
            )
        frame = info.delta
        destinations[info.agent_name] = Destination(
            pages=listed,
            state_pages=_numbers(info.dst_state_indices),
            metadata_slot=info.dst_aux_index,
            pool_pages=(frame.pool_pages or None) if frame else None,
            metadata_slots=(frame.metadata_slots or None) if frame else None,
            takes_metadata=bool(frame and frame.takes_metadata),
        )
    return Load(
        chunk_id=chunk_id,
        pages=own,
        metadata_slot=metadata_slot,
        state_pages=_numbers(state_pages),
        destinations=destinations,
    )


def _numbers(pages: Sequence[Any] | None) -> tuple[int, ...]:
    """SGLang gives lists of numbers, arrays, and lists of arrays."""
    if pages is None or not len(pages):
        return ()
    return tuple(np.asarray(pages, np.int64).reshape(-1).tolist())
