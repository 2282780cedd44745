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
    "create_backend",
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
        from nixl import _api
    except ImportError as error:
        return f"nixl {NEEDED} or newer is needed, and cannot be imported: {error}"
    name, found = _distribution(_api)
    if found and Version(found) < Version(NEEDED):
        return f"{name} {found} is installed, {NEEDED} or newer is needed"
    missing = ", ".join(_missing(_api))
    return f"{name} {found or '(of unknown version)'} has no {missing}" if missing else ""


def _distribution(api: Any) -> tuple[str, str]:
    """Name and version of the package that NIXL's classes come from: ``nixl`` hands on those of one
    for the CUDA that is there. No version where it was built from source."""
    origin = getattr(getattr(api, "nixl_agent", None), "__module__", "nixl")
    for name in origin.partition(".")[0].replace("_", "-"), "nixl":
        try:
            return name, metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return "nixl", ""


def _missing(api: Any) -> list[str]:
    modes = getattr(api, "nixl_thread_sync_t", None)
    config, agent = getattr(api, "nixl_agent_config", None), getattr(api, "nixl_agent", None)
    names = [] if hasattr(modes, "NIXL_THREAD_SYNC_RW") else ["NIXL_THREAD_SYNC_RW"]
    known = inspect.signature(config).parameters if callable(config) else {}
    names += [f"nixl_agent_config({name}=...)" for name in _CONFIG if name not in known]
    return names + [f"nixl_agent.{name}" for name in _AGENT if not hasattr(agent, name)]
