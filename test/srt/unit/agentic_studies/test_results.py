"""What is committed of the studies: pages, and the numbers on them."""

from __future__ import annotations

import json

import msgspec
import pytest

from benchmark.agentic.fleet.spec import Arm
from benchmark.agentic.studies.spec import FOLDER


def test_each_headline_is_that_of_its_summary() -> None:
    """Guards against a first sentence that was changed on the page alone."""
    for page in (FOLDER / "results").glob("*/page.md"):
        told = json.loads((page.parent / "summary.json").read_text())
        assert told["answer"] in page.read_text(), page


@pytest.mark.parametrize("study", ["interference", "linear_lmetric", "worth"])
def test_committed_pages_and_summaries_are_of_one_run(study: str) -> None:
    """Guards against one of the two being written again without the other."""
    folder = FOLDER / "results" / study
    text = (folder / "page.md").read_text()
    told = json.loads((folder / "summary.json").read_text())
    for sentence in (told["answer"], *told["breaks"], *told["warnings"]):
        assert sentence in text
    arms = told["study"]["arms"].items()
    titles = {name: msgspec.convert(arm, Arm).shown for name, arm in arms}
    for load, of_arms in told["loads"].items():
        section = text.split(f"## {load} sessions at once\n")[1].split("\n## ")[0]
        for arm, of in of_arms.items():
            row = next(
                line for line in section.splitlines() if line.startswith(f"| {titles[arm]} |")
            )
            assert "{mean:.1f} / {most} |".format(**of["at_once"]) in row
            assert "{p50:.0%} / {max:.0%} |".format(**of["pool"]) in row
            shares = [worker["prompt_tokens"] for worker in of["by_worker"]]
            if len(shares) > 1:
                assert f"| {' / '.join(f'{x:.0%}' for x in shares)} |" in text
            if stages := of["stages"]:
                assert " | ".join(f"{x * 1e3:.2f} ms" for x in stages.values()) in text
            if event := of["prefill_events"]:
                assert f"] | {event['share_lost']:.2f} | - |" in text
                assert f"| {event['prefills']} |" in text
    assert any(of["prefill_events"] for of in told["loads"].get("8", {}).values()) == (
        study == "interference"
    )
    assert (f"commit {told['commit']};" if "commit" in told else "; sent from ") in text
