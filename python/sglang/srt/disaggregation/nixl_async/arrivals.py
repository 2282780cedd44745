"""What has arrived for a room on a decode rank, writer by writer."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from typing_extensions import override

from sglang.srt.disaggregation.nixl_async.notifications import Notification

if TYPE_CHECKING:
    from sglang.srt.disaggregation.nixl.conn import TransferStatus
else:
    TransferStatus = object


@dataclasses.dataclass
class DeltaTransferStatus(TransferStatus):
    """SGLang's record of a room, keyed by writer where SGLang keys by pipeline stage."""

    #: Writers whose metadata has arrived. (A stock prefill does not say whose it was.)
    aux_writers: set[int] = dataclasses.field(default_factory=set)
    #: Writers that said with one note that all they write for the room is here.
    done_writers: set[int] = dataclasses.field(default_factory=set)
    #: Where the metadata go that come in such a note; None where none was announced.
    metadata_slot: int | None = None
    #: Writers that said that they write no more, whatever they have written.
    stopped_writers: set[int] = dataclasses.field(default_factory=set)
    #: What ``is_done`` last said; None where something has arrived since. Every room is asked in
    #: every step, and few of them get anything in it.
    _was_done: bool | None = None

    def take(self, note: Notification, num_writers: int) -> None:
        """Record one notification. Idempotent.

        ``num_writers`` is the number of prefill ranks that write for the room.
        """
        self._was_done = None
        if note.kind == "aux":
            if note.writer is None:
                self.received_aux = True
            else:
                self.aux_writers.add(note.writer)
            return
        assert note.writer is not None
        if note.kind == "done":
            self.done_writers.add(note.writer)
            self.num_pp_ranks_expected = num_writers
            return
        if note.kind == "state":
            self.received_state_per_pp.add(note.writer)
            return
        self.received_kvs_per_pp[note.writer].add(note.chunk)
        if note.is_last:
            self.expected_kvs_per_pp[note.writer] = note.chunk + 1
            self.num_pp_ranks_expected = num_writers

    def finished_writers(self) -> set[int]:
        """Writers from which everything has arrived: KV, metadata, and state where it is due."""
        return self.done_writers | {
            writer
            for writer, chunks in self.expected_kvs_per_pp.items()
            if len(self.received_kvs_per_pp[writer]) == chunks
            and (self.received_aux or writer in self.aux_writers)
            and (not self.expects_state or writer in self.received_state_per_pp)
        }

    @override
    def is_done(self) -> bool:
        # Stock also calls a failed room done, and asks afterwards whether it failed. Its heartbeat
        # says so here before the room's status does: between the two, the room is neither.
        if self._was_done is None:
            expected = self.num_pp_ranks_expected
            self._was_done = expected is not None and len(self.finished_writers()) >= expected
        return self._was_done

    # ---- delta/watch.py: Progress ----

    def stop(self, writer: int) -> None:
        """The rank ``writer`` said that it writes no more."""
        self.stopped_writers.add(writer)

    def is_quiet(self, writers: int) -> bool:
        """Whether each of ``writers`` ranks has delivered everything or stopped."""
        return len(self.finished_writers() | self.stopped_writers) >= writers
