"""The prefill scheduler: what its chunk sender gives a room is the delta, in order, once; and an
abort of a request that waits."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import find, given, settings
from hypothesis import strategies as st

from effort import tries
from sglang.srt.disaggregation.delta.pages import page_ceil, page_floor
from sglang.srt.disaggregation.delta.prefill.scheduler import DeltaPrefill
from sglang.srt.disaggregation.prefill import SchedulerDisaggregationPrefillMixin
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers.io_struct import AbortReq
from sglang.srt.managers.scheduler import Scheduler

FIRST_PAGE = 7
MAX_PROMPT = 400


@dataclass(frozen=True)
class Scenario:
    """One prompt and how prefill computes it."""

    page: int
    prompt: int
    prefix: int
    #: Tokens computed at the end of each chunk but the last.
    chunks: tuple[int, ...]
    #: The overlapped loop gives the end of a chunk, the plain one does not.
    overlap: bool


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    """Any prompt, prefix and chunking; prefixes at, inside and beyond chunks, and full hits."""
    page = draw(st.sampled_from([1, 4, 16, 64]))
    prompt = draw(st.integers(1, MAX_PROMPT))
    prefix = page_floor(draw(st.one_of(st.integers(0, prompt), st.just(prompt))), page)
    # A chunk that is not the last one leaves at least one token to compute.
    chunks = draw(st.sets(st.integers(1, prompt - 1), max_size=5)) if prompt > 1 else set()
    return Scenario(page, prompt, prefix, tuple(sorted(chunks)), draw(st.booleans()))


class RecordingSender:
    """Counts pages as a backend's sender does: the last call is the one that completes them."""

    def __init__(self, prefix: int, pages: int) -> None:
        self.decode_prefix_len = prefix
        self.left = pages
        self.calls: list[tuple[list[int], bool]] = []
        #: Whether the room's metadata were filled, at each call.
        self.had_metadata: list[bool] = []
        self.has_metadata = False

    def send(self, pages: np.ndarray, state_indices: Any = None) -> None:
        self.left -= len(pages)
        self.had_metadata.append(self.has_metadata)
        self.calls.append((pages.tolist(), self.left == 0))


@dataclass
class Outcome:
    """What one prompt's chunks led to."""

    calls: list[tuple[list[int], bool]]
    cursor: list[int] = field(default_factory=list)
    metadata: int = 0
    #: The end of the computed tokens at each call, and whether the metadata were filled.
    computed: list[int] = field(default_factory=list)
    had_metadata: list[bool] = field(default_factory=list)


def play(scenario: Scenario) -> Outcome:
    """Run the real sender over one prompt, chunk by chunk."""
    page, prompt = scenario.page, scenario.prompt
    pages = page_ceil(prompt, page) // page
    sender = RecordingSender(scenario.prefix, pages - scenario.prefix // page)
    outcome = Outcome(sender.calls)

    class Prefill(SchedulerDisaggregationPrefillMixin):  # type: ignore[misc]
        """The sender's surroundings."""

        token_to_kv_pool_allocator = SimpleNamespace(page_size=page, get_kvcache=lambda: None)
        req_to_token_pool = SimpleNamespace(
            req_to_token=torch.arange(FIRST_PAGE * page, FIRST_PAGE * page + prompt)[None]
        )

        @property
        def disagg_metadata_buffers(self) -> Any:
            return SimpleNamespace(set_buf=self._count)

        def _count(self, req: Any) -> None:
            outcome.metadata += 1
            sender.has_metadata = True

    req = SimpleNamespace(
        rid="r",
        bootstrap_room=1,
        req_pool_idx=0,
        start_send_idx=0,
        origin_input_ids=list(range(prompt)),
        fill_ids=[],
        disagg_kv_sender=sender,
    )
    prefill = Prefill()
    outcome.had_metadata = sender.had_metadata
    for end in scenario.chunks:
        req.fill_ids = list(range(end))
        prefill.send_kv_chunk(req, last_chunk=False, end_idx=end if scenario.overlap else None)
        outcome.computed += [end] * (len(sender.calls) - len(outcome.computed))
        outcome.cursor.append(req.start_send_idx)
    req.fill_ids = list(range(prompt + 1))  # with the first generated token
    prefill.send_kv_chunk(req, last_chunk=True)
    outcome.computed += [prompt] * (len(sender.calls) - len(outcome.computed))
    outcome.cursor.append(req.start_send_idx)
    return outcome


def wrong(scenario: Scenario) -> list[str]:
    """What is wrong with the outcome of a scenario."""
    outcome = play(scenario)
    first = FIRST_PAGE + scenario.prefix // scenario.page
    pages = page_ceil(scenario.prompt, scenario.page) // scenario.page
    expected = list(range(first, FIRST_PAGE + pages))
    problems = []
    if [page for pages, _ in outcome.calls for page in pages] != expected:
        problems.append("the pages sent are not those that decode lacks")
    if [last for _, last in outcome.calls].count(True) != 1 or not outcome.calls[-1][1]:
        problems.append("not exactly one last call, at the end")
    if any(not pages for pages, _ in outcome.calls[:-1]):
        problems.append("an empty chunk in the middle")
    if outcome.cursor != sorted(outcome.cursor):
        problems.append("the cursor went back")
    if outcome.metadata != 1:
        problems.append(f"metadata filled {outcome.metadata} times")
    return problems


@pytest.mark.hazard("send-cursor-ahead")
@settings(max_examples=tries(200))
@given(scenario=scenarios())
def test_exactly_the_delta_is_sent(scenario: Scenario) -> None:
    """Guards against a cursor that moves before the chunk is known to be needed, and so sends
    prefix pages into the delta's destinations; against a chunk that is sent twice, late or empty;
    and against a room without its one last call."""
    assert wrong(scenario) == []


@pytest.mark.hazard("prefix-rounding")
@pytest.mark.parametrize("page", [1, 16, 64])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    ("prefix", "chunks", "calls"),
    [
        (0, (2, 4), 3),
        (1, (2, 4), 3),  # inside the first chunk
        (2, (2, 4), 2),  # on its border
        (5, (2, 4), 1),  # beyond two chunks
        (6, (2, 4), 1),  # everything: metadata alone
        (6, (), 1),
        (5, (5,), 1),
    ],
)
def test_where_the_prefix_ends(
    page: int, overlap: bool, prefix: int, chunks: tuple[int, ...], calls: int
) -> None:
    """Guards against the places where an earlier form of this code went wrong, in pages."""
    scenario = Scenario(page, 6 * page, prefix * page, tuple(end * page for end in chunks), overlap)
    assert wrong(scenario) == []
    assert len(play(scenario).calls) == calls


@pytest.mark.hazard("sent-before-written")
@settings(max_examples=tries(100))
@given(scenario=scenarios())
def test_nothing_is_sent_before_it_is_there(scenario: Scenario) -> None:
    """Guards against pages sent ahead of the forward pass that fills them, which would move what
    was in them before, and against a last call that takes metadata not written yet."""
    outcome = play(scenario)
    for (pages, is_last), computed, had_metadata in zip(
        outcome.calls, outcome.computed, outcome.had_metadata, strict=True
    ):
        round_to = page_ceil if is_last else page_floor
        whole = round_to(computed, scenario.page) // scenario.page
        assert max(pages, default=0) < FIRST_PAGE + whole
        assert had_metadata == is_last


@settings(max_examples=tries(50))
@given(scenario=scenarios())
def test_without_a_prefix_nothing_changes(scenario: Scenario) -> None:
    """Guards against other behaviour for stock decode servers: same calls as the stock method."""
    scenario = replace(scenario, prefix=0)
    ours = play(scenario)
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(DeltaPrefill, "send_kv_chunk")
        assert play(scenario) == ours


@pytest.mark.hazard("send-cursor-ahead")
@pytest.mark.nightly
def test_the_stock_method_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against properties that cannot fail: SGLang's own method breaks them."""
    monkeypatch.delattr(DeltaPrefill, "send_kv_chunk")
    find(scenarios(), lambda scenario: bool(wrong(scenario)), settings=settings(max_examples=500))
    # The stock cursor is set by the caller; even then, a prefix beyond a chunk goes wrong.
    assert wrong(Scenario(16, 64, 64, (16,), False))


# ---- aborts ----


class Sender:
    """Counts what happened to a room."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def abort(self) -> None:
        self.calls.append("abort")

    def clear(self) -> None:
        self.calls.append("clear")


def prefill_with(*rids: str) -> tuple[Any, dict[str, Any]]:
    """As much of a prefill scheduler as an abort needs, with requests that wait for their turn."""
    scheduler = Scheduler.__new__(Scheduler)
    reqs = {
        rid: SimpleNamespace(
            rid=rid,
            disagg_kv_sender=Sender(),
            mamba_pool_idx=None,
            metadata_buffer_index=-1,
        )
        for rid in rids
    }
    scheduler.__dict__.update(
        server_args=SimpleNamespace(disaggregation_mode="prefill"),
        disaggregation_mode=DisaggregationMode.PREFILL,
        waiting_queue=list(reqs.values()),
        enable_hicache_storage=False,
        send_to_tokenizer=SimpleNamespace(send_output=lambda *message: None),
        grammar_manager=SimpleNamespace(abort_requests=lambda request: None),
        req_to_metadata_buffer_idx_allocator=SimpleNamespace(free=lambda index: None),
        disagg_prefill_bootstrap_queue=SimpleNamespace(
            queue=[], kv_manager=SimpleNamespace(rooms=object())
        ),
        disagg_prefill_inflight_queue=[],
        running_batch=SimpleNamespace(reqs=[]),
        cur_batch=None,
    )
    return scheduler, reqs


@pytest.mark.parametrize(("rid", "ended"), [("a", ["a"]), ("", ["a", "b"]), ("x", [])])
def test_a_request_that_waits_on_prefill(rid: str, ended: list[str]) -> None:
    """Guards against a room that stays in prefill's tables, and a decode server that waits for it,
    when the abort finds the request in the waiting queue; and against ending another one's."""
    scheduler, reqs = prefill_with("a", "b")
    scheduler.abort_request(AbortReq(rid=rid, abort_all=not rid))
    assert [req.rid for req in scheduler.waiting_queue] == [r for r in reqs if r not in ended]
    for name, req in reqs.items():
        assert req.disagg_kv_sender.calls == (["abort", "clear"] if name in ended else [])
