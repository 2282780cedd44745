"""The report of ``python -m sglang.srt.patchset`` on SGLang 0.5.23."""

from __future__ import annotations

import importlib
from importlib import metadata

from sglang.srt.disaggregation.lead import attach
from sglang.srt.patchset import __version__, environment
from sglang.srt.patchset.table import CURRENT_VERSION

#: The name of our entry point in SGLang's group of plugins, as in pyproject.toml.
PLUGINS, NAME = "sglang.srt.plugins", "disagg_lead"


def report(*, check: bool) -> tuple[str, int]:
    """What SGLang's processes attach in this environment, and the exit status: 0 if that is what
    the variables ask for, 1 if the package is turned off, 2 if something is wrong.

    ``check``: compare the signatures of the methods that the parts wrap, which imports SGLang.

    Raises:
        ValueError: a variable is set to something that is not allowed; a server would not start.
    """
    is_active = environment.ACTIVE.read()
    problem = _why_not_loaded() if is_active else "inert: turned off by SGLANG_PATCHSET=0"
    on = attach.parts_on()
    misfits = _misfits() if check else []
    lines = (
        f"version  {__version__}",
        f"sglang   found {CURRENT_VERSION}: the group {attach.GROUP}, attached by SGLang's plugins",
        f"patchset {problem or 'active'}",
        "",
        f"group {attach.GROUP}: {', '.join(part.name for part in on) or 'off'}",
        *(f"  {'on' if part in on else 'off':4} {part.name}" for part in attach.PARTS),
        *(f"  by {each}" for each in environment.given(attach.GROUP)),
        *(f"  does not fit: {each}" for each in misfits),
    )
    status = 1 if not is_active else 2 if problem or misfits else 0
    return "\n".join(lines) + "\n", status


def _why_not_loaded() -> str:
    """Why SGLang's loader will not call us; empty if it will."""
    if NAME not in metadata.entry_points(group=PLUGINS).names:
        return f"is not loaded: the entry point {NAME} of {PLUGINS} is not installed"
    if NAME not in (environment.sglang_names("SGLANG_PLUGINS") or [NAME]):
        return f"is not loaded: SGLANG_PLUGINS does not name {NAME}"
    return ""


def _misfits() -> list[str]:
    """What of SGLang is not as the parts expect it; nothing is replaced."""
    wraps = attach.Wraps()
    for part in attach.PARTS:
        importlib.import_module(f"{attach.__package__}.{part.name}").install(wraps)
    return wraps.misfits
