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

from sglang.srt.disaggregation.async_transfer.background import standing_back
from sglang.srt.disaggregation.delta.env import env_int

logger = logging.getLogger(__name__)

#: Microseconds; 0 has NIXL's progress thread spin, as it does in stock SGLang.
PROGRESS_DELAY = "SGLANG_DISAGGREGATION_NIXL_PROGRESS_DELAY"


@contextmanager
def attuned() -> Iterator[None]:
    """Agents that are made meanwhile are for use from several threads, and leave the CPU alone.

    NIXL's default is no thread synchronisation at all, and SGLang leaves it at that: it posts from
    its scheduler's thread alone. And NIXL's own progress thread never sleeps: its Python binding
    asks for a pause of zero. With any other pause it waits for the transport's events, and looks
    by itself once a pause. NIXL's threads take no core from running ones when they wake up. Not for
    use while other threads make agents.

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
    delay_us = env_int(PROGRESS_DELAY, 1000, minimum=0)
    config = _api.nixl_agent_config
    _api.nixl_agent_config = functools.partial(
        config, sync_mode=modes.NIXL_THREAD_SYNC_STRICT, capture_telemetry=True
    )
    try:
        with _progress_delay(_api.nixl_agent, delay_us), standing_back():
            yield
    finally:
        _api.nixl_agent_config = config


@contextmanager
def _progress_delay(agent: Any, delay_us: int) -> Iterator[None]:
    """The binding's settings, with ``pthrDelay`` as we want it: Python callers cannot give it."""
    binding = getattr(sys.modules[agent.__module__], "nixlBind", None)
    stock: Any = getattr(binding, "nixlAgentConfig", None)
    if stock is None or not hasattr(stock, "pthrDelay"):
        logger.warning("this NIXL does not take %s; its progress thread spins", PROGRESS_DELAY)
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
