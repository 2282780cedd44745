"""benchmark/lead: what the arms run, which answers are wrong, and what is said of the rounds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmark.harness.stream import Result
from benchmark.lead import measure
from benchmark.lead.arms import ARMS, configure
from benchmark.lead.page import Bound, brings, rate, verdict

PARTS = {
    "thread": "SGLANG_DISAGGREGATION_NIXL_PROGRESS_DELAY",
    "local": "SGLANG_DISAGGREGATION_DECODE_LOCAL_TOKENS",
    "admission": "SGLANG_DISAGGREGATION_DECODE_ADMISSION",
    "itl": "SGLANG_DISAGGREGATION_DECODE_LOCAL_MAX_ITL_MS",
}


@pytest.mark.parametrize("kind", ARMS)
def test_arms_differ_in_what_they_are_called(kind: str) -> None:
    """Guards against a gain that comes from another pool, or from a part that no column names."""
    pools = set()
    for arm in ARMS[kind]:
        said = {part.rstrip("0123456789") for part in arm.name.split(" + ")}
        flag = "--num-reserved-decode-tokens 64"
        for server in configure(kind, arm, Path("m")).layout():
            words, decodes = " ".join(server.command), server.role == "decode"
            assert {part for part in PARTS if PARTS[part] in server.env} == said - {"stock", "r"}
            assert server.env["SGLANG_PATCHSET"] == ("0" if "stock" in said else "1")
            assert (flag in words) == (decodes and "r" in said)
            assert ("--disaggregation-decode-enable-radix-cache" in words) == decodes
            pools.add((server.role, words.partition("--max-total-tokens ")[2].split()[0]))
    assert len(pools) == 2


def answered(label: str, *tokens: int) -> Result:
    return Result(label, 0.0, output_ids=list(tokens))


def test_answers_that_differ_or_fail_are_named() -> None:
    """Guards against a figure of wrong answers, and of answers that nobody else has given."""
    failed = answered("d", 1, 2)
    failed.fail("abort", "said so")
    given = [answered("a", 1, 2), answered("b", 1, 3), answered("c", 1), failed]
    expected = {f"alone 0 {label}": [1, 2] for label in "abd"}
    found = measure.wrong(given, "alone 0", expected)
    assert [text.partition(":")[0] for text in found] == ["b", "c", "d"]


def row(arm: str, number: int, value: float) -> dict[str, Any]:
    return {"load": "alone", "arm": arm, "round": number, "requests_per_s": value}


@pytest.mark.parametrize(
    ("values", "holds", "said"),
    [
        ((2.0, 2.1, 1.9), True, "a gain"),
        ((1.0, 4.0, 1.0), True, "WITHIN THE NOISE"),
        ((0.5, 0.51, 0.49), False, "A LOSS"),
    ],
)
def test_what_is_said_of_a_part(values: tuple[float, ...], holds: bool, said: str) -> None:
    """Guards against a part that is said to gain what the rounds differ by."""
    rows = [row("stock", n, 1) for n in range(3)] + [
        row("local", n, v) for n, v in enumerate(values)
    ]
    part = Bound("alone", "local", "stock", rate, 1)
    assert verdict(rows, part).holds == holds
    assert brings(rows, part).startswith(f"{said}: ")
    assert brings(rows[:1] + rows[3:4], part).startswith("no interval: ")
    lower = part._replace(at_least=False)
    assert verdict(rows, lower).holds != holds
