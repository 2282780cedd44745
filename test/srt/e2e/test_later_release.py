"""Pairs of this release and SGLang 0.5.12.post1, as they occur in a rolling upgrade."""

from __future__ import annotations

from pathlib import Path

import pytest

import later_release
from benchmark.harness import metrics
from benchmark.harness.fleet import Pair
from e2e.support import Ids, Reference, pair_config, prompt_maker, take_turns

PAGE = 16
BACKENDS = ("nixl", "mooncake")
pytestmark = later_release.ON_REQUEST


def prompts(model: Path) -> list[Ids]:
    """Return four prompts with a common prefix; two end at a page's end."""
    tokens = prompt_maker(model, seed=9)
    shared = tokens(20 * PAGE)
    return [[*shared, *tokens(count)] for count in (1, PAGE, 37, 2 * PAGE)]


def two_turns(pair: Pair, reference: Reference, asked: list[Ids]) -> None:
    """Check the answers to each prompt twice, and to the next turn."""
    assert pair.generate(asked, 12) == reference.answers(asked, 12)
    # Full hits if decode shares prefixes.
    take_turns(pair, reference, asked, 2, 12, lambda: asked[0][:9])


@pytest.mark.parametrize("backend", BACKENDS)
def test_decode_servers_first(model: Path, reference: Reference, logs: Path, backend: str) -> None:
    """Guards against partial hits that fail and full hits that wait for 300 s: a decode server of
    the later release with its radix cache, behind a prefill server of this release."""
    config = pair_config(
        model, logs, backend=backend, page_size=PAGE, radix=True,
        env={"MC_FORCE_TCP": "1"}, decode_env=later_release.environment(), decode_args=(),
        prefill_args=(),
    )  # fmt: skip
    with Pair(config, logs / f"decode-{backend}") as pair:
        two_turns(pair, reference, prompts(model))
        counters = pair.metrics()[0]
        assert counters[metrics.SKIPPED_TOKENS] >= 4 * 20 * PAGE, "decode's prefixes were sent"
        assert "Traceback" not in pair.processes["prefill"].log_text()


@pytest.mark.parametrize("backend", BACKENDS)
def test_prefill_servers_first(model: Path, reference: Reference, logs: Path, backend: str) -> None:
    """Guards against a prefix length for a prefill server of the later release: it does not report
    that it accepts one, and the frame with our prefix length would end its thread. Our decode
    server must request whole prompts in SGLang's own format."""
    config = pair_config(
        model, logs, backend=backend, page_size=PAGE, radix=True,
        env={"MC_FORCE_TCP": "1"}, prefill_env=later_release.environment(), decode_args=(),
        prefill_args=(),
    )  # fmt: skip
    with Pair(config, logs / f"prefill-{backend}") as pair:
        two_turns(pair, reference, prompts(model))
        counters = pair.metrics()[1]
        assert counters[metrics.PROMPT_TOKENS] > 0 and counters[metrics.HIT_TOKENS] == 0
        assert "does not support decode_prefix_len" in pair.processes["decode"].log_text()
        assert "Traceback" not in pair.processes["decode"].log_text()
