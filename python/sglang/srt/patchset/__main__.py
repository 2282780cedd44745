"""``python -m sglang.srt.patchset``: report of the feature groups, their rows and their status."""

from __future__ import annotations

import argparse
import importlib
import sys
import traceback
from importlib import metadata
from typing import Any  # Any: what a module of the table's strings has

from sglang.srt.patchset import __version__, driverless, environment
from sglang.srt.patchset.status import (
    GroupStatus,
    PatchsetState,
    RowStatus,
    examine,
    installed_version,
    load_all,
    state,
)
from sglang.srt.patchset.table import CURRENT_VERSION, LEAD, LEAD_ATTACH

#: SGLang's entry point group for plugins.
PLUGINS = "sglang.srt.plugins"
#: Our entry point in it (``pyproject.toml``).
NAME = "disagg_lead"
REFUSES = "\na server does not start: {}\n"


def main(argv: list[str] | None = None) -> int:
    """Print the report.

    Returns:
        0 if active, 1 if inert, 2 if a group is not attached or a server would refuse to start. A
        crash of this command also has exit status 2.
    """
    parser = argparse.ArgumentParser(prog="python -m sglang.srt.patchset", description=__doc__)
    parser.add_argument(
        "--check",
        action="store_true",
        help="import every module of the table and check that each row is bound",
    )
    parser.add_argument(
        "--environment", action="store_true", help="print only the tables of environment variables"
    )
    options = parser.parse_args(argv)
    if options.environment:
        titles = environment.VARIABLE_GROUPS.items()
        print("\n".join(f"## {title}\n\n{environment.table(group)}" for group, title in titles))
        return 0
    if installed_version() == CURRENT_VERSION:
        text, status = report_current(check=options.check)
        sys.stdout.write(text)
        return status
    if state().inert:
        sys.stdout.write(render(state()))
        return 1
    if options.check:
        driverless.allow_import()
    now = load_all() if options.check else examine()
    wrong = environment.wrong()
    note = driverless.NOTE * driverless.has_no_operators()
    sys.stdout.write(render(now) + note + REFUSES.format(wrong) * bool(wrong))
    bad = {GroupStatus.STOCK, GroupStatus.PENDING} if options.check else {GroupStatus.STOCK}
    return 2 if wrong or any(group.status in bad for group in now.groups) else 0


def render(now: PatchsetState) -> str:
    """Return the report as text."""
    status = f"inert: {now.inert}" if now.inert else "active"
    lines = [
        f"version  {__version__}",
        f"sglang   found {now.found}, expected {now.expected} or {CURRENT_VERSION}",
        f"patchset {status}",
    ]
    for group_state in now.groups:
        group = group_state.group
        mark = "stock" if now.inert else group_state.status.value
        needs = f" (needs {', '.join(group.needs)})" if group.needs else ""
        lines += ["", f"group {group.name}: {mark}", f"  {group.what}{needs}"]
        if group_state.reason:
            lines.append(f"  {group_state.reason}")
        for row_state in group_state.rows:
            mark = RowStatus.STOCK.value if now.inert else row_state.status.value
            lines.append(f"  {mark:8} {row_state.row.target}")
            lines.append(f"           with {row_state.row.mixin}")
            lines.append(f"           for  {row_state.row.why}")
            if row_state.row.when:
                lines.append(f"           when {row_state.row.when}")
            if row_state.reason:
                lines.append(f"           {row_state.reason}")
        for exchange in group.exchanges:
            lines.append(f"  exchange {exchange.module}:{', '.join(exchange.names)}")
            lines.append(f"           for  {exchange.why}")
    return "\n".join(lines) + "\n"


def report_current(*, check: bool) -> tuple[str, int]:
    """Return the report of what SGLang 0.5.23's processes attach in this environment, and the exit
    status: 0 if it is what the variables select, 1 if the package is turned off, 2 if not.

    ``check``: also compare the signatures of the wrapped methods, which imports SGLang.
    """
    attach: Any = importlib.import_module(LEAD_ATTACH)
    is_active, problem = environment.is_active(), ""
    wrong = environment.wrong() if is_active else ""
    if not is_active:
        problem = "inert: turned off by SGLANG_PATCHSET=0"
    elif NAME not in metadata.entry_points(group=PLUGINS).names:
        problem = f"is not loaded: the entry point {NAME} of {PLUGINS} is not installed"
    elif NAME not in (environment.sglang_names("SGLANG_PLUGINS") or [NAME]):
        problem = f"is not loaded: SGLANG_PLUGINS does not name {NAME}"
    wraps = attach.Wraps()
    for part in attach.PARTS if check else ():
        importlib.import_module(f"{attach.__package__}.{part.name}").install(wraps)
    on = [] if wrong else attach.parts_on()
    lines = (
        f"version  {__version__}",
        f"sglang   found {CURRENT_VERSION}: the group {LEAD}, attached by SGLang's plugins",
        f"patchset {problem or 'active'}",
        "",
        f"group {LEAD}: {', '.join(part.name for part in on) or 'off'}",
        *(f"  {'on' if part in on else 'off':4} {part.name}" for part in attach.PARTS),
        *(f"  by {setting}" for setting in environment.given(LEAD, *environment.ALSO_LEAD)),
        *(f"  does not fit: {misfit}" for misfit in wraps.misfits),
    )
    status = 1 if not is_active else 2 if problem or wrong or wraps.misfits else 0
    return "\n".join(lines) + "\n" + REFUSES.format(wrong) * bool(wrong), status


if __name__ == "__main__":
    try:
        code = main()
    except Exception:
        traceback.print_exc()
        code = 2  # because Python's own status 1 means inert
    sys.exit(code)
