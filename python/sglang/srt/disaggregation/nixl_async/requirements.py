"""Whether the installed NIXL can carry asynchronous transfers. Asked before anything is bound."""

from __future__ import annotations

import inspect
from importlib import metadata
from typing import Any

#: The first release with thread synchronisation modes for agents and strided descriptor lists.
#: As in the extras of pyproject.toml.
NEEDED = "1.5"

_CONFIG = ("sync_mode", "capture_telemetry")
_AGENT = (
    "add_remote_agent",
    "check_xfer_state",
    "get_new_notifs",
    "get_xfer_descs",
    "get_xfer_telemetry",
    "initialize_xfer",
    "make_prepped_xfer",
    "prep_xfer_dlist",
    "release_xfer_handle",
    "remove_remote_agent",
    "send_notif",
    "transfer",
)


def obstacle() -> str:
    """Why asynchronous transfer cannot use this NIXL; empty if it can."""
    from packaging.version import Version

    try:
        found = metadata.version("nixl")
    except metadata.PackageNotFoundError:
        found = ""  # built from source: its interface says more than a version
    if found and Version(found) < Version(NEEDED):
        return f"nixl {found} is installed, {NEEDED} or newer is needed"
    try:
        from nixl import _api
    except ImportError as error:
        return f"nixl {NEEDED} or newer is needed, and cannot be imported: {error}"
    missing = ", ".join(_missing(_api))
    return f"nixl {found or '(of unknown version)'} has no {missing}" if missing else ""


def _missing(api: Any) -> list[str]:
    modes = getattr(api, "nixl_thread_sync_t", None)
    config, agent = getattr(api, "nixl_agent_config", None), getattr(api, "nixl_agent", None)
    names = [] if hasattr(modes, "NIXL_THREAD_SYNC_STRICT") else ["NIXL_THREAD_SYNC_STRICT"]
    known = inspect.signature(config).parameters if callable(config) else {}
    names += [f"nixl_agent_config({name}=...)" for name in _CONFIG if name not in known]
    return names + [f"nixl_agent.{name}" for name in _AGENT if not hasattr(agent, name)]
