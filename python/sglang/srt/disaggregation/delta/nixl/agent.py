"""Configuration of SGLang's NIXL agent, and the check of the installed NIXL (``obstacle``).

The agent is made safe for several threads, with a progress thread that sleeps while idle. SGLang
creates the agent in the middle of a constructor, from classes that it looks up there, which are
exchanged during the call (listed in ``patchset/table.py``).

Contract: the context managers replace names of the binding for the whole process, so that no other
thread may create agents inside them.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import metadata
from typing import Any  # Any: NIXL's binding has no types

from sglang.srt.disaggregation.delta.prefill.transfer_backend import batch_scheduling
from sglang.srt.patchset import environment
from sglang.srt.patchset.attach import exchanged, replaced

logger = logging.getLogger(__name__)

#: First release with thread synchronisation modes for agents and strided descriptor lists. Keep
#: equal to the extras in pyproject.toml.
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

    NIXL's default is no thread synchronisation, which SGLang keeps, because it posts only from its
    scheduler thread. Use the reader-writer mode, in which posts, polls and releases run in
    parallel; with strict synchronisation a release would wait for another thread's whole post,
    holding the GIL. Give each thread a UCX worker, because posts over one worker would wait for
    each other.

    NIXL's own progress thread never sleeps, because its Python binding sets a pause of zero; with
    any other pause the thread waits for the transport's events and polls once per pause.

    Raises:
        ValueError: ``SGLANG_DISAGGREGATION_NIXL_PROGRESS_DELAY`` is not a number.
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
            """Agent with ``workers`` UCX workers in addition to those of NIXL's own threads, which
            Python callers cannot set."""

            def create_backend(self, backend: str, options: dict[str, str]) -> None:
                # ``num_workers`` includes the ``num_threads`` of NIXL's thread pool.
                total = int(options.get("num_threads", 0)) + workers
                super().create_backend(backend, {**options, "num_workers": str(total)})

        names["nixl_agent"] = Agent
    with exchanged("nixl_async", "nixl._api", names), batch_scheduling():
        yield


@contextmanager
def pausing_agents() -> Iterator[None]:
    """Give agents created inside this block a progress thread with our pause, and their native
    threads SCHED_BATCH. For a later SGLang, whose agents are safe for several threads."""
    from nixl import _api

    names = _with_delay(_api, environment.NIXL_PROGRESS_DELAY)
    with replaced("nixl._api", names), batch_scheduling():
        yield


def _with_delay(api: Any, delay: environment.Variable[int]) -> dict[str, Any]:
    """Return replacements of the binding's settings that set ``pthrDelay``, which Python callers
    cannot set; empty if NIXL has no such setting."""
    delay_us = delay.read()
    stock: Any = getattr(getattr(api, "nixlBind", None), "nixlAgentConfig", None)
    if stock is None or not hasattr(stock, "pthrDelay"):
        logger.warning(
            "NIXL does not accept %s: its progress thread polls without a pause and takes a core",
            delay.name,
        )
        return {}

    class Delayed(stock):
        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, delay_us if name == "pthrDelay" else value)

    return {"nixlBind.nixlAgentConfig": Delayed}


# ---- check of the installed NIXL, before anything is bound ----


def obstacle() -> str:
    """Return why asynchronous transfer cannot use this NIXL or its chosen backend; empty if it can.

    Only the UCX backend reports a write as done when its bytes are in the peer's memory, on which
    the notification of a complete room relies (``NixlBackend.state``). LIBFABRIC reports local
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
    # ``nixl`` re-exports the classes of the package for the installed CUDA. A package built from
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
    parameters = inspect.signature(config).parameters if callable(config) else {}
    missing = [] if has_modes else ["NIXL_THREAD_SYNC_RW"]
    missing += [f"nixl_agent_config({name}=...)" for name in _CONFIG if name not in parameters]
    missing += [f"nixl_agent.{method}" for method in _AGENT if not hasattr(agent, method)]
    text = f"{name} {found or '(of unknown version)'} has no {', '.join(missing)}"
    return text if missing else ""
