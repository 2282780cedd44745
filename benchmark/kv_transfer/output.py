"""Files of a run: JSON lines with every room, a Markdown page, tables. No paths, no host names."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmark.harness.environment import describe
from benchmark.harness.report import Spread
from benchmark.kv_transfer.records import Round

Rows = Sequence[Sequence[str]]


class Lines:
    """Appends JSON lines: one that describes the run, then one a room."""

    def __init__(self, path: Path, header: Mapping[str, Any]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._out = path.open("w")
        self.write({"kind": "run", **header})

    def write(self, row: Mapping[str, Any]) -> None:
        """One line; NaN becomes null."""
        self._out.write(json.dumps(plain(row)) + "\n")
        self._out.flush()

    def rounds(self, arm: str, case: Any, rounds: Sequence[Round], **more: Any) -> None:
        """A line for each room and each round; times in seconds."""
        about = {"arm": arm, **more, **dataclasses.asdict(case)}
        for number, each in enumerate(rounds):
            stages = [
                dataclasses.asdict(transfer)
                for transfer in each.transfers
                if not transfer.is_metadata
            ]
            for times in each.rooms:
                row = {
                    "kind": "room",
                    **about,
                    "round": number,
                    "peer": times.peer,
                    "outcome": times.outcome,
                    "error": times.error or None,
                    "send_s": times.sends,
                    "send_cpu_s": times.send_cpus,
                    "total_s": times.total,
                    "arrival_s": times.arrived - times.began if times.arrived else None,
                    "transfers": [
                        {k: v for k, v in stage.items() if k not in ("room", "is_metadata")}
                        for stage in stages
                        if stage["room"] == times.room
                    ],
                }
                self.write(row)
            self.write(
                {
                    "kind": "round",
                    **about,
                    "round": number,
                    "wall_s": each.wall_s,
                    "moved_bytes": each.moved_bytes,
                    "cpu_s": each.cpu_s,
                    "peer_cpu_s": each.peer_cpu_s,
                }
            )

    def failure(self, arm: str, case: Any, error: Exception) -> None:
        """A load that an arm could not carry."""
        text = str(error).splitlines()[0]
        self.write({"kind": "failure", "arm": arm, **dataclasses.asdict(case), "error": text})

    def close(self) -> None:
        """Nothing more follows."""
        self._out.close()


def plain(value: Any) -> Any:
    """As JSON has it: floats with six significant digits, NaN as null."""
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return plain(dataclasses.asdict(value))
    if isinstance(value, float):
        return None if math.isnan(value) else float(f"{value:.6g}")
    return value


def machine() -> dict[str, str]:
    """Date, machine and versions."""
    from importlib.metadata import PackageNotFoundError, version

    found = describe()
    for name in ("mooncake-transfer-engine", "mooncake-transfer-engine-non-cuda"):
        try:
            found["mooncake"] = version(name)
        except PackageNotFoundError:
            continue
    return found


def p50_p99(spread: Spread, unit: float) -> str:
    """Two percentiles in units of ``unit`` seconds; a dash where there are none."""
    if math.isnan(spread.p50):
        return "-"
    return f"{_short(spread.p50 / unit)} / {_short(spread.p99 / unit)}"


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def number(value: float, digits: int = 2) -> str:
    """A number, or a dash."""
    return "-" if math.isnan(value) else f"{value:,.{digits}f}"


def markdown(columns: Sequence[str], rows: Rows) -> str:
    """A table."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def write_page(path: Path, title: str, header: Mapping[str, Any], parts: Sequence[str]) -> None:
    """The dated results page."""
    facts = "\n".join(f"- {key}: {value}" for key, value in header.items())
    path.write_text("\n\n".join([f"# {title}", facts, *parts]).rstrip() + "\n")
