"""A study on a machine whose CPU other processes used."""

from __future__ import annotations

from benchmark.agentic.report.numbers import numbers
from benchmark.agentic.report.verdict import warnings
from benchmark.harness.cpu import Contention
from unit.agentic_studies.test_numbers import cells, run, verdict


def test_a_busy_machine_gives_no_verdict() -> None:
    """Guards a verdict from servers that waited for a CPU that other processes used: some loads in
    many are a warning only."""
    result = run(cells("a", 1.0), cells("b", 0.5))
    for cell in result.cells:
        cell.contention = Contention(waited=0.5, others=0.01)
    assert "b is best" in verdict(result), "servers that wait for each other are the arm's own"
    result.cells[0].contention = Contention(waited=0.4, others=0.3)
    assert verdict(result).startswith("**No verdict: the machine was busy.** In 1 of 6 loads")
    (text,) = (text for text in warnings(result, numbers(result)) if "busy" in text)
    assert "in 1 of 6 loads: a at 4. At worst the servers waited for a CPU in 40%" in text
    many = run(cells("a", 1.0, rounds=6), cells("b", 0.5, rounds=6))
    many.cells[0].contention = Contention(waited=0.4, others=0.3)
    assert "b is best" in verdict(many)
