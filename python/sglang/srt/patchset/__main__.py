"""``python -m sglang.srt.patchset``: the replacement table and whether it is active."""

from __future__ import annotations

import argparse
import sys

from sglang.srt.patchset.status import RowStatus, State, load_all, state


def main(argv: list[str] | None = None) -> int:
    """Print the report; 0 if active, 1 if inert, 2 if a row failed."""
    parser = argparse.ArgumentParser(prog="python -m sglang.srt.patchset", description=__doc__)
    parser.add_argument(
        "--check",
        action="store_true",
        help="import every module of the table and see each row bound (on a machine without a GPU, "
        "with SGLANG_CPU_STANDIN=1)",
    )
    options = parser.parse_args(argv)
    now = load_all() if options.check and state().active else state()
    sys.stdout.write(render(now))
    if now.inert:
        return 1
    incomplete = options.check and any(r.status is not RowStatus.BOUND for r in now.rows)
    return 2 if now.failed or incomplete else 0


def render(now: State) -> str:
    """The report as text."""
    status = f"inert: {now.inert}" if now.inert else "active"
    lines = [
        f"sglang   found {now.found}, expected {now.expected}",
        f"patchset {status}",
        "",
    ]
    for item in now.rows:
        mark = "stock" if now.inert else item.status.value
        lines.append(f"{mark:8} {item.row.target}")
        lines.append(f"         with {item.row.mixin}")
        lines.append(f"         for  {item.row.why}")
        if item.reason:
            lines.append(f"         {item.reason}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
