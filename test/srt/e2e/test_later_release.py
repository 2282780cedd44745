"""A pair of this release and SGLang 0.5.12.post1, as a rolling upgrade makes them."""

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
    """Four prompts with a common start; two end with a page."""
    tokens = prompt_maker(model, seed=9)
    shared = tokens(20 * PAGE)
    return [[*shared, *tokens(count)] for count in (1, PAGE, 37, 2 * PAGE)]


def two_turns(pair: Pair, reference: Reference, asked: list[Ids]) -> None:
    """Each prompt twice, and then with its answer and more, equal to the reference."""
    assert pair.generate(asked, 12) == reference.answers(asked, 12)
    # Full hits where decode shares.
    take_turns(pair, reference, asked, 2, 12, lambda: asked[0][:9])


@pytest.mark.parametrize("backend", BACKENDS)
def test_decode_servers_first(model: Path, reference: Reference, logs: Path, backend: str) -> None:
    """A decode server of the later release with its radix cache on, behind a prefill server of
    ours. Guards against partial hits that fail and full hits that wait for 300 s."""
    config = pair_config(
        model, logs, backend=backend, page_size=PAGE, radix=True,
        env={"MC_FORCE_TCP": "1"}, decode_env=later_release.environment(), decode_args=(),
        prefill_args=(),
    )  # fmt: skip
    with Pair(config, logs / f"decode-{backend}") as pair:
        two_turns(pair, reference, prompts(model))
        counters = pair.metrics()[0]
        assert counters[metrics.SKIPPED_TOKENS] >= 4 * 20 * PAGE, "what decode had was not sent"
        assert "Traceback" not in pair.processes["prefill"].log_text()


@pytest.mark.parametrize("backend", BACKENDS)
def test_prefill_servers_first(model: Path, reference: Reference, logs: Path, backend: str) -> None:
    """A prefill server of the later release before our decode server. It does not say that it takes
    a prefix, and the frame by which ours would tell one ends its thread. Guards against both: it is
    sent whole prompts, in SGLang's own words."""
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
