"""A decode server that stalls while prefill writes to it. When it wakes, prefill has given the
rooms up and reused their pages for other KV."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from benchmark.harness import checks, metrics
from benchmark.harness.client import Request, Result, Target, send_all
from benchmark.harness.fleet import Pair
from benchmark.harness.servers import Sizes
from e2e.support import (
    EventLogs,
    Ids,
    Reference,
    ask_decode,
    frozen,
    pair_config,
    prompt_maker,
    settle,
    until,
)
from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST

PAGE = 16
NEW_TOKENS = 8
PREFILL_TOKENS = 6000
DEADLINE_S = 4.0
ENV = {
    "SGLANG_DISAGGREGATION_TRANSFER_TIMEOUT": str(DEADLINE_S),
    # Only prefill ends a room, and decode frees the pages on prefill's message.
    "SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL": "60",
    "SGLANG_DISAGGREGATION_QUARANTINE_TIMEOUT": "40",
    # Over shared memory a write completes even while the peer is stopped.
    "UCX_TLS": "tcp",
    "MC_FORCE_TCP": "1",
    # Mooncake's own timeout of a call, after which the room's pages are released.
    "MC_TRANSFER_TIMEOUT": "8",
}
#: Prefill's log of a write that continues after its room was given up.
UNDER_WAY = "did not settle by its deadline"


def wait_given_up(pair: Pair, rooms: int) -> None:
    """Wait until prefill can be flushed, because no request is left, and check its failed rooms."""

    def flushed() -> bool:
        with suppress(RuntimeError):
            checks.flush(pair.prefill_url)
            return True
        return False

    until(flushed, 60.0)
    assert metrics.scrape(pair.prefill_url)[metrics.FAILED_ROOMS] >= rooms


def overwrite(pair: Pair, prompts: list[Ids]) -> None:
    """Let prefill compute ``prompts`` without a decode server, in the pages that it has freed."""
    fake_decode = {"bootstrap_host": FAKE_BOOTSTRAP_HOST, "bootstrap_port": 0, "bootstrap_room": 0}
    requests = [Request(prompt, 1, extra=fake_decode) for prompt in prompts]
    results = asyncio.run(send_all(Target(pair.prefill_url), requests, concurrency=1))
    assert not [result.error for result in results if result.error]


def wait_served_again(pair: Pair, prompts: list[Ids], answers: list[Ids]) -> None:
    """Send the prompts until all are answered. No answer may be wrong; requests may fail first,
    because Mooncake's decode rank registers again only with a room that fails."""

    def all_answered() -> bool:
        results = asyncio.run(ask_decode(pair, prompts, NEW_TOKENS))
        for result, answer in zip(results, answers, strict=True):
            assert result.error or result.output_ids == answer
        return not any(result.error for result in results)

    until(all_answered, 60.0)


@pytest.mark.hazard("late-word-revives-room", "source-given-away")
@pytest.mark.nightly
@pytest.mark.parametrize("backend", ["nixl", "mooncake"])
def test_decode_wakes_after_prefill_gave_its_rooms_up(
    model: Path, reference: Reference, logs: Path, backend: str
) -> None:
    """Guards against a decode server that takes a room which prefill gave up as complete: late
    writes carry other prompts' KV by then. Afterwards both servers are idle and balanced, and the
    same prompts are answered right. In every run ``component/transfer/test_transfers.py`` and
    ``unit/delta/prefill/test_worker.py`` give rooms up during writes."""
    if backend == "mooncake":
        pytest.importorskip("mooncake.engine", reason="needs Mooncake's transfer engine")
    tokens = prompt_maker(model, seed=61)
    prompts = [tokens(600 + 37 * number) for number in range(4)]
    # Each alone nearly fills prefill's pool.
    others = [tokens(PREFILL_TOKENS - 200) for _ in range(3)]
    sizes = Sizes(pool_tokens=PREFILL_TOKENS, page_size=PAGE, chunked_prefill_tokens=256)
    config = pair_config(model, logs, backend=backend, page_size=PAGE, env=ENV, prefill_sizes=sizes)
    events = EventLogs(logs)
    with Pair(config, logs) as pair, ThreadPoolExecutor(1) as pool:
        warm = [tokens(300)]
        assert pair.generate(warm, NEW_TOKENS) == reference.answers(warm, NEW_TOKENS)
        events.read()
        with ExitStack() as decode_frozen:
            with frozen(pair.processes["prefill"]):
                asked = pool.submit(asyncio.run, ask_decode(pair, prompts, NEW_TOKENS))
                events.wait_admitted(len(prompts))
                decode_frozen.enter_context(frozen(pair.processes["decode"]))
            wait_given_up(pair, len(prompts))
            assert UNDER_WAY in pair.processes["prefill"].log_text(), "nothing was written"
            overwrite(pair, others)
        results: list[Result] = asked.result(timeout=120)
        for result in results:
            assert result.error is not None and result.output_ids == [], result
        answers = reference.answers(prompts, NEW_TOKENS)
        wait_served_again(pair, prompts, answers)
        assert pair.generate(prompts, NEW_TOKENS) == answers, "wrong answers from decode's tree"
        settle(pair)
