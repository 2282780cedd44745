"""``python -m sglang.srt.patchset``: the feature groups with their rows, and what is active."""

from __future__ import annotations

import argparse
import sys

from sglang.srt.patchset import __version__, environment
from sglang.srt.patchset.base_version import installed_version
from sglang.srt.patchset.status import (
    GroupState,
    GroupStatus,
    RowStatus,
    State,
    examine,
    load_all,
    state,
)
from sglang.srt.patchset.table import CURRENT_VERSION


def main(argv: list[str] | None = None) -> int:
    """Print the report; 0 if active, 1 if inert, 2 if a group is not attached as it should be."""
    parser = argparse.ArgumentParser(prog="python -m sglang.srt.patchset", description=__doc__)
    parser.add_argument(
        "--check",
        action="store_true",
        help=(
            "import every module of the table and check that each row is bound (without a GPU: "
            "with SGLANG_CPU_STANDIN=1)"
        ),
    )
    parser.add_argument(
        "--environment", action="store_true", help="print only the tables of environment variables"
    )
    options = parser.parse_args(argv)
    if options.environment:
        titles = environment.GROUPS.items()
        print("\n".join(f"## {title}\n\n{environment.table(group)}" for group, title in titles))
        return 0
    if installed_version() == CURRENT_VERSION:
        from sglang.srt.patchset import current

        text, status = current.report(check=options.check)
        sys.stdout.write(text)
        return status
    now = load_all() if options.check and state().active else examine()
    sys.stdout.write(render(now))
    if now.inert:
        return 1
    pending = any(group.status is GroupStatus.PENDING for group in now.groups)
    return 2 if now.problem or now.stock or (options.check and pending) else 0


def render(now: State) -> str:
    """The report as text."""
    status = f"inert: {now.inert}" if now.inert else "active"
    lines = [
        f"version  {__version__}",
        f"sglang   found {now.found}, expected {now.expected} or {CURRENT_VERSION}",
        f"patchset {status}",
    ]
    if now.problem:
        lines.append(f"         {now.problem}")
    for group in now.groups:
        lines += ["", *_render_group(group, bool(now.inert))]
    return "\n".join(lines) + "\n"


def _render_group(state: GroupState, inert: bool) -> list[str]:
    group = state.group
    mark = "stock" if inert else state.status.value
    needs = f" (needs {', '.join(group.needs)})" if group.needs else ""
    lines = [f"group {group.name}: {mark}", f"  {group.what}{needs}"]
    if state.reason:
        lines.append(f"  {state.reason}")
    for item in state.rows:
        mark = RowStatus.STOCK.value if inert else item.status.value
        lines.append(f"  {mark:8} {item.row.target}")
        lines.append(f"           with {item.row.mixin}")
        lines.append(f"           for  {item.row.why}")
        if item.row.when:
            lines.append(f"           when {item.row.when}")
        if item.reason:
            lines.append(f"           {item.reason}")
    for each in group.exchanges:
        lines.append(f"  exchange {each.module}:{', '.join(each.names)}")
        lines.append(f"           for  {each.why}")
    return lines


if __name__ == "__main__":
    sys.exit(main())
