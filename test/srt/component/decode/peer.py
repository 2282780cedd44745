"""The prefill server as the decode queues see it: a receiver for each room, driven by the test."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.delta.decode.deferred import DeferredFree
from sglang.srt.disaggregation.delta.wire import DeltaFrame
from sglang.srt.disaggregation.fake.conn import FakeKVReceiver


class Room:
    """Stands for a backend's receiver, and records the announcement."""

    require_staging = False

    def __init__(self) -> None:
        self.state = KVPoll.Bootstrapping
        self.conclude_state: int | None = None
        #: The client left.
        self.aborted = False
        self.failure = ""
        self.pages: np.ndarray | None = None
        #: Announced pages of an index, if any.
        self.state_pages: np.ndarray | None = None
        self.prefix_len = self.prompt_tokens = 0
        self.metadata_index = -1
        #: True if the prefix was announced, False if only stock's message was sent.
        self.announced = False
        #: Number of times that decode cleared the room, and reasons of its withdrawals.
        self.clears = 0
        self.withdrawn: list[str] = []
        #: Prefill was notified that decode computes the request.
        self.yielded = False
        #: Prefill may write to the announced pages, also after decode gave the room up.
        self.writing = False
        #: Prefill's first token, set with the KV, because a draft model's last slot depends on it.
        self.first_token: int | None = None

    def poll(self) -> int:
        return self.state if self.conclude_state is None else self.conclude_state

    def is_ready(self, rank: int) -> bool:
        """Return True if the addresses of the prefill ranks are known."""
        return True

    def init(self, rank: int) -> None:
        self.state = KVPoll.WaitingForInput

    def send_metadata(self, pages: np.ndarray, index: int, state_indices: Any = None) -> None:
        assert self.pages is None, "announced twice"
        assert pages.dtype == np.int32
        self.pages, self.metadata_index, self.state_pages = pages, index, state_indices
        self.state = KVPoll.Transferring
        self.writing = True

    def announce(
        self, frame: DeltaFrame, pages: np.ndarray, index: int, state_indices: Any = None
    ) -> None:
        self.announced = True
        self.prefix_len, self.prompt_tokens = frame.decode_prefix_len, frame.prompt_tokens
        self.send_metadata(pages, index, state_indices)

    # ---- used by a deferred free ----

    def defer_free(self) -> DeferredFree | None:
        followed: Any = self
        return DeferredFree(followed, 1, forget=self.forget_deferred) if self.writing else None

    def is_drained(self, writers: int) -> bool:
        return not self.writing

    def forget_deferred(self) -> None:
        assert self.cleared

    def failure_exception(self) -> None:
        self.clear()
        raise RuntimeError(self.failure or "room failed")

    @property
    def cleared(self) -> bool:
        return self.clears > 0

    def withdraw(self, reason: str) -> None:
        """Notify prefill that the room will never be announced."""
        assert self.pages is None and not self.cleared, "withdrawn after its announcement"
        self.withdrawn.append(reason)

    def yield_room(self) -> None:
        """Notify prefill that decode computes the request."""
        assert self.pages is None and not self.cleared and not self.yielded
        self.yielded = True

    def clear(self) -> None:
        self.clears += 1

    def abort(self) -> None:
        self.aborted, self.conclude_state = True, KVPoll.Failed

    def fail_handshake(self, text: str) -> None:
        self.conclude_state = KVPoll.Failed


class WarmUpRoom(FakeKVReceiver):  # type: ignore[misc]
    """SGLang's own receiver of warm-up and health requests, after the handshake."""

    def __init__(self) -> None:
        super().__init__(None, "", None)
        self.init(0)


class Unasked:
    """Prefill servers that never answer; ``asking``: queries go on for ever."""

    def __init__(self, asking: bool = True) -> None:
        self.connections = SimpleNamespace(
            is_connected=lambda address, dp_rank: False,
            ensure=lambda address: False,
            is_asking=lambda address: asking,
            forget_unwanted=lambda addresses: None,
            refusals=SimpleNamespace(pop=lambda address: f"{address} could not be reached"),
        )


@dataclass
class Manager:
    """The part of a transfer manager that admission uses."""

    item_lens: list[int]
    #: Bytes of a page of the index.
    state_lens: list[int] = field(default_factory=list)
    #: Prefill servers that do not understand a prefix.
    stock_peers: set[str] = field(default_factory=set)
    #: Rooms of requests in the queues.
    request_status: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.kv_args = SimpleNamespace(kv_item_lens=self.item_lens, state_item_lens=self.state_lens)
        self.waiting_timeout = 300
        self.servers = Unasked()

    def peer_takes_delta(self, address: str) -> bool:
        return address not in self.stock_peers

    def peer_yields(self, address: str) -> bool:
        return address not in self.stock_peers


class Mailbox:
    """Counts clients' answers, by request."""

    def __init__(self) -> None:
        self.ends: defaultdict[str, int] = defaultdict(int)
        self.reasons: dict[str, Any] = {}

    @property
    def expired(self) -> int:
        """Return the number of requests that reached the limit of their wait for memory."""
        return sum("_ADMISSION_TIMEOUT" in str(reason) for reason in self.reasons.values())

    def send_output(self, message: Any, req: Any) -> None:
        """Record an abort that the scheduler reports directly."""
        self.ends[req.rid] += 1
        self.reasons[req.rid] = message.finished_reason

    def stream(self, reqs: list[Any]) -> None:
        """Record outputs of a batch; a finished request is streamed for the last time."""
        for req in reqs:
            if req.finished():
                self.ends[req.rid] += 1
                self.reasons[req.rid] = req.finished_reason.to_json()
