"""The pair over two real NIXL agents."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from nixl import _api

from component.transfer import pair
from component.transfer.bare import without_engine
from component.transfer.pair import Hold
from sglang.srt.disaggregation.delta.nixl.agent import configured_agents
from sglang.srt.disaggregation.delta.prefill.transfer_backend import TransferSettings
from sglang.srt.disaggregation.nixl import conn
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.patchset import environment


@cache
def agent_of(name: str, sends: bool) -> Any:
    """Return the agent that all pairs of an interpreter share, because dozens of agents slow each
    other down. It has SGLang's settings: a prefill server's agent has a thread pool."""
    with configured_agents(TransferSettings().queues if sends else 0):
        config = _api.nixl_agent_config(backends=["UCX"], num_threads=8 if sends else 0)
        return _api.nixl_agent(name, config)


class Side(pair.Side):
    """One server with an agent."""

    def __init__(self, name: str, mode: Any) -> None:
        agent = agent_of(name, mode == DisaggregationMode.PREFILL)
        statuses = defaultdict(conn.TransferStatus)
        kind = conn.NixlKVManager
        super().__init__(without_engine(kind, agent=agent, transfer_statuses=statuses), mode)


def raises(*arguments: Any, **options: Any) -> Any:
    """Raise, in place of a call of NIXL's binding."""
    raise ZeroDivisionError


#: Closed pairs, because their memory stays registered with the agents.
_CLOSED: list[Any] = []


class Pair(pair.Pair):
    """Prefill and decode, connected by NIXL."""

    ends = (conn, "Nixl")
    peer = "decode"
    tells_at_once = False
    word_of_a_broken_write = "reported: "

    def side(self, name: str, mode: Any) -> Any:
        return Side(name, mode)

    def close(self) -> None:
        manager = self.prefill.manager
        manager.transfers.stop(1.0)
        manager.peers.forget(self.peer)
        _CLOSED.append(self)

    def start(self) -> None:
        with pytest.MonkeyPatch.context() as patch:
            # How long an aborted transfer counts as in flight.
            hold = replace(environment.QUARANTINE_TIMEOUT, default=0.1)
            patch.setattr(environment, "QUARANTINE_TIMEOUT", hold)
            self.prefill.manager._start_bootstrap_thread()
        self.decode.manager._start_heartbeat_checker_thread()

    @contextmanager
    def agent_that(self, **calls: Any) -> Iterator[Any]:
        """Replace some calls of prefill's agent within the context."""
        agent = self.prefill.manager.agent
        agent.__dict__.update(calls)
        try:
            yield agent
        finally:
            for name in calls:
                del agent.__dict__[name]

    @contextmanager
    def counted(self, *names: str) -> Iterator[Counter[str]]:
        """Count calls of prefill's agent within the context."""
        agent, calls = self.prefill.manager.agent, Counter[str]()

        def count(name: str) -> Any:
            method = getattr(type(agent), name)

            def call(*arguments: Any, **options: Any) -> Any:
                calls[name] += 1
                return method(agent, *arguments, **options)

            return call

        with self.agent_that(**{name: count(name) for name in names}):
            yield calls

    @contextmanager
    def held_up(self) -> Iterator[Hold]:
        agent, hold = self.prefill.manager.agent, Hold()

        def state(handle: Any) -> str:
            if not hold.is_over():
                return "PROC"
            found: str = type(agent).check_xfer_state(agent, handle)
            return found

        with self.agent_that(check_xfer_state=state):
            try:
                yield hold
            finally:
                hold.release()

    @contextmanager
    def breaking(self) -> Iterator[None]:
        with self.agent_that(transfer=raises):
            yield
