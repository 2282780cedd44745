"""How SGLang's NIXL agent is made: safe for several threads, and asleep while nothing arrives.

SGLang makes its agent in the middle of a constructor, from classes that it looks up there. So these
are exchanged meanwhile, and nothing else is.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sglang.srt.disaggregation.delta.prefill.transfer_pool import standing_back
from sglang.srt.patchset import environment

logger = logging.getLogger(__name__)

#: What NIXL's threads of a sending agent get of a core beside a thread at work: a tenth.
_NICE = 10


@contextmanager
def attuned(workers: int = 0) -> Iterator[None]:
    """Agents that are made meanwhile are for use from several threads, ``workers`` of which post
    (0: it only receives), and leave the CPU alone.

    NIXL's default is no thread synchronisation at all, and SGLang leaves it at that: it posts from
    its scheduler's thread alone. We ask for readers and writers: posts, looks and releases run side
    by side. With strict synchronisation a release waits for the whole of another thread's post, and
    it does so with the interpreter's lock in its hands. Posts over one UCX worker would still wait
    for each other, so every thread gets one of its own (and one is left for the others).

    NIXL's own progress thread never sleeps: its Python binding asks for a pause of zero. With any
    other pause it waits for the transport's events, and looks by itself once a pause. A sending
    agent has more threads, which copy and look without a pause while anything is under way. They
    are nicer than ours: where cores are scarce, a worker that holds the interpreter's lock would
    wait for one, and the scheduler for both. Not for use while other threads make agents.

    Raises:
        RuntimeError: this NIXL has no synchronisation modes.
        ValueError: ``SGLANG_DISAGGREGATION_NIXL_PROGRESS_DELAY`` is no number.
    """
    from nixl import _api

    modes = getattr(_api, "nixl_thread_sync_t", None)
    if modes is None:
        raise RuntimeError(
            "asynchronous NIXL transfer needs a NIXL with thread synchronisation modes "
            "(nixl_thread_sync_t, in 1.5); install the version in constraints.txt"
        )
    delay_us = environment.NIXL_PROGRESS_DELAY.read()
    config, agent = _api.nixl_agent_config, _api.nixl_agent
    _api.nixl_agent_config = functools.partial(
        config, sync_mode=modes.NIXL_THREAD_SYNC_RW, capture_telemetry=True
    )
    _api.nixl_agent = _sending(agent, workers + 1) if workers else agent
    try:
        with _progress_delay(agent, delay_us), standing_back():
            yield
    finally:
        _api.nixl_agent_config, _api.nixl_agent = config, agent


def _sending(agent: Any, workers: int) -> Any:
    """The binding's agent, with so many workers in its UCX backend, which Python callers cannot ask
    for, and with nicer threads. (Those of the sockets, which SGLang opens beside it, stay.)"""

    class Agent(agent):
        def create_backend(self, backend: str, options: Any = None) -> None:
            extra = {"num_workers": str(workers)} if backend == "UCX" else {}
            with standing_back(_NICE):
                super().create_backend(backend, {**(options or {}), **extra})

    return Agent


@contextmanager
def _progress_delay(agent: Any, delay_us: int) -> Iterator[None]:
    """The binding's settings, with ``pthrDelay`` as we want it: Python callers cannot give it."""
    binding = getattr(sys.modules[agent.__module__], "nixlBind", None)
    stock: Any = getattr(binding, "nixlAgentConfig", None)
    if stock is None or not hasattr(stock, "pthrDelay"):
        name = environment.NIXL_PROGRESS_DELAY.name
        logger.warning("this NIXL does not take %s; its progress thread spins", name)
        yield
        return

    class Delayed(stock):
        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, delay_us if name == "pthrDelay" else value)

    assert binding is not None
    binding.nixlAgentConfig = Delayed
    try:
        yield
    finally:
        binding.nixlAgentConfig = stock
