"""How SGLang's NIXL agent is made, and whether the installed NIXL will do (``obstacle``).

Made safe for several threads, and asleep while nothing arrives. SGLang makes its agent in the
middle of a constructor, from classes that it looks up there. They are exchanged meanwhile, and
listed in ``patchset/table.py``.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from importlib import metadata
from typing import Any  # Any: NIXL's binding has no types

from sglang.srt.disaggregation.delta.prefill.transfer_backend import batch_scheduling
from sglang.srt.patchset import environment
from sglang.srt.patchset.attach import exchanged

logger = logging.getLogger(__name__)

#: The first release with thread synchronisation modes for agents and strided descriptor lists.
#: As in the extras of pyproject.toml.
NEEDED = "1.5"

_CONFIG = ("sync_mode",)
_AGENT = (
    "add_remote_agent",
    "check_xfer_state",
    "create_backend",
    "get_new_notifs",
    "get_xfer_descs",
    "initialize_xfer",
    "make_prepped_xfer",
    "prep_xfer_dlist",
    "release_xfer_handle",
    "remove_remote_agent",
    "send_notif",
    "transfer",
)


@contextmanager
def configured_agents(workers: int = 0) -> Iterator[None]:
    """Make agents created inside this block safe for ``workers`` posting threads (0: receive only),
    with a progress thread that pauses.

    NIXL's default is no thread synchronisation at all, and SGLang leaves it at that: it posts from
    its scheduler's thread alone. We ask for readers and writers: posts, polls and releases run side
    by side. With strict synchronisation a release waits for the whole of another thread's post, and
    it does so holding the interpreter's lock. Posts over one UCX worker would still wait for each
    other, so every thread gets one of its own.

    NIXL's own progress thread never sleeps: its Python binding asks for a pause of zero. With any
    other pause it waits for the transport's events, and polls by itself once a pause. Not for use
    while other threads make agents.

    Raises:
        ValueError: ``SGLANG_DISAGGREGATION_NIXL_PROGRESS_DELAY`` is no number.
    """
    from nixl import _api

    mode = _api.nixl_thread_sync_t.NIXL_THREAD_SYNC_RW
    names = {
        "nixl_agent_config": functools.partial(_api.nixl_agent_config, sync_mode=mode),
        **_with_delay(_api, environment.NIXL_PROGRESS_DELAY),
    }
    if workers:
        stock: Any = _api.nixl_agent

        class Agent(stock):
            """With ``workers`` UCX workers beside those of NIXL's own threads, which Python
            callers cannot ask for."""

            def create_backend(self, backend: str, options: dict[str, str]) -> None:
                # ``num_workers`` is a total: NIXL's thread pool takes ``num_threads`` of it.
                total = int(options.get("num_threads", 0)) + workers
                super().create_backend(backend, {**options, "num_workers": str(total)})

        names["nixl_agent"] = Agent
    with exchanged("nixl_async", "nixl._api", names), batch_scheduling():
        yield


@contextmanager
def pausing_agents() -> Iterator[None]:
    """Give agents created inside this block a progress thread with our pause, and their native
    threads SCHED_BATCH. For a later SGLang: all else stays the binding's, and its agents are safe
    for several threads as they are."""
    from nixl import _api

    with ExitStack() as stack:
        for name, value in _with_delay(_api, environment.NIXL_PROGRESS_DELAY).items():
            holder, _, last = name.partition(".")
            binding = getattr(_api, holder)
            stack.callback(setattr, binding, last, getattr(binding, last))
            setattr(binding, last, value)
        stack.enter_context(batch_scheduling())
        yield


def _with_delay(api: Any, delay: environment.Variable[int]) -> dict[str, Any]:
    """The binding's settings, with ``pthrDelay`` as we want it: Python callers cannot give it."""
    delay_us = delay.read()
    stock: Any = getattr(getattr(api, "nixlBind", None), "nixlAgentConfig", None)
    if stock is None or not hasattr(stock, "pthrDelay"):
        logger.warning(
            "this NIXL does not accept %s; its progress thread polls without a pause", delay.name
        )
        return {}

    class Delayed(stock):
        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, delay_us if name == "pthrDelay" else value)

    return {"nixlBind.nixlAgentConfig": Delayed}


# ---- is this NIXL new enough? Asked before anything is bound ----


def obstacle() -> str:
    """Return why asynchronous transfer cannot use this NIXL or its chosen backend; empty if it can.

    Only NIXL's UCX backend reports a write as done when its bytes are in the peer's memory, and
    the note that completes a room relies on that (``NixlBackend.state``). LIBFABRIC reports local
    completion.
    """
    from packaging.version import Version

    from sglang.srt.environ import envs

    name = "SGLANG_DISAGGREGATION_NIXL_BACKEND"
    if (chosen := getattr(envs, name).get()) != "UCX":
        return (
            f"{name} is {chosen}: decode may see a room complete before its KV has arrived. Only "
            "UCX is known to keep that order"
        )
    try:
        from nixl import _api
    except ImportError as error:
        return f"nixl {NEEDED} or newer is needed, and cannot be imported: {error}"
    # ``nixl`` hands on the classes of a package for the CUDA that is there. One that was built from
    # source has no version.
    agent, config = getattr(_api, "nixl_agent", None), getattr(_api, "nixl_agent_config", None)
    origin = getattr(agent, "__module__", "nixl").partition(".")[0].replace("_", "-")
    name, found = "nixl", ""
    for name in (origin, "nixl"):
        with suppress(metadata.PackageNotFoundError):
            found = metadata.version(name)
            break
    if found and Version(found) < Version(NEEDED):
        return f"{name} {found} is installed, {NEEDED} or newer is needed"
    has_modes = hasattr(getattr(_api, "nixl_thread_sync_t", None), "NIXL_THREAD_SYNC_RW")
    known = inspect.signature(config).parameters if callable(config) else {}
    missing = [] if has_modes else ["NIXL_THREAD_SYNC_RW"]
    missing += [f"nixl_agent_config({each}=...)" for each in _CONFIG if each not in known]
    missing += [f"nixl_agent.{each}" for each in _AGENT if not hasattr(agent, each)]
    text = f"{name} {found or '(of unknown version)'} has no {', '.join(missing)}"
    return text if missing else ""
