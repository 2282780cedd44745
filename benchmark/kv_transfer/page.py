"""The tables of README.md, from the committed results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmark.harness.report import markdown

RESULTS = Path(__file__).parent / "results"
ARMS = {
    "stock": "stock 0.5.10.post1",
    "ours": "this package, no flag",
    "radix": "decode with its radix cache",
}
#: A row's label, the run whose results it shows, and the format of a cell.
ROWS = (
    (
        "`send` of 2,048 scattered pages, scheduler time: p50, p99",
        "send",
        "{send_us[p50]:,.0f}, {send_us[p99]:,.0f} us",
    ),
    (
        "gap of the scheduler's loop under load: p99, largest",
        "gap",
        "{gap_ms[p99]:.1f}, {gap_ms[largest]:.1f} ms",
    ),
    ("64 rooms on 4 decode peers, shared memory", "fleet", "{gb_per_s:.2f} GB/s"),
    (
        "the same: CPU seconds a GB of prefill, of decode",
        "fleet",
        "{cpu_s_per_gb:.2f}, {decode_cpu_s_per_gb:.2f}",
    ),
    ("the same, all progress threads spinning", "spinning/fleet", "{gb_per_s:.2f} GB/s"),
    ("the same over TCP", "tcp/fleet", "{gb_per_s:.2f} GB/s"),
    (
        "one of 4 decode peers stopped: outcome of its rooms",
        "stall",
        "{rooms_of_the_stopped[failed]} failed, {rooms_of_the_stopped[stuck]} without an end",
    ),
    (
        "NIXL's own threads of an idle prefill process, share of a core",
        "idle",
        "{idle_share_of_a_core[native threads]:.1%}",
    ),
)
RUNS = tuple(dict.fromkeys(name for _, name, _ in ROWS))
_DELAY = "{until_decode_sees_it_ms[p50]:.3g} / {until_decode_sees_it_ms[p99]:.3g}"


def read(name: str) -> Any:
    """Return the results of ``name``: ``[FOLDER/]RUN``."""
    return json.loads((RESULTS / f"{name}-nixl.json").read_text())


def by_arm(name: str, cell: str) -> dict[str, str]:
    """Return a cell of each arm."""
    return {result["arm"]: cell.format(**result) for result in read(name)["results"]}


def transfer() -> str:
    """Return the table of measurements by arm, with the commands."""
    rows = []
    for label, name, cell in ROWS:
        cells = by_arm(name, cell)
        rows.append([label, *(cells.get(arm, "") for arm in ARMS)])
    ran: dict[str, list[str]] = {}
    for name in RUNS:
        run = read(name)["run"]
        when = f"{run['machine']}; {run['date']}, commit {run['commit']}"
        ran.setdefault(when, []).append(f"`{run['command']}`")
    intro = ";\n".join(f"{when}, by " + ",\n".join(commands) for when, commands in ran.items())
    return f"{intro}:\n\n" + markdown(["", *ARMS.values()], rows)


def bounds() -> str:
    """Return the list of bounds of those runs, each with its verdict."""
    texts = [(r["run"]["command"], bound) for r in map(read, RUNS) for bound in r["bounds"]]
    return "".join(f"- {bound} (`{command}`)\n" for command, bound in texts)


def pauses() -> str:
    """Return the delay until decode sees a small room, by the pause of NIXL's own thread."""
    rows = []
    for pause in (0, 1000):
        names = [f"pause-{pause}/{transport}/delay" for transport in ("shm", "tcp")]
        rows.append([f"{pause:,}", *(by_arm(name, _DELAY)["ours"] for name in names)])
    return markdown(["`SGLANG_DISAGGREGATION_NIXL_PROGRESS_DELAY`", "shared memory", "TCP"], rows)
