"""Turns that two data parallel ranks compute, each with its own requests, in SGLang's own loop.

The ranks run each step together (``prepare_mlp_sync_batch``): a rank that omits one, or takes part
twice, would hang the server. Each rank is a thread.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from component.decode.overlapped import Overlapped, random_talks
from component.decode.pair import RANKS, Exchange
from component.decode.steps import ids
from sglang.srt.batch_overlap import two_batch_overlap
from sglang.srt.disaggregation.policy import chunks as local_chunks
from sglang.srt.environ import envs
from sglang.srt.layers.dp_attention import set_is_extend_in_batch
from sglang.srt.layers.moe.token_dispatcher import MooncakeEPDispatcher, NixlEPDispatcher
from sglang.srt.layers.moe.utils import DeepEPMode, MoeA2ABackend
from sglang.srt.managers import scheduler_dp_attn_mixin
from sglang.srt.managers.io_struct import ContinueGenerationReqInput, PauseGenerationReqInput
from sglang.srt.patchset import environment

CHUNK, STEP, IDLE = "chunk", "step", "idle"


class Rank(Overlapped):
    """A rank with SGLang's own agreement between the ranks, over an ``Exchange``."""

    rank: int
    exchange: Exchange
    turns = 0

    def join(self, rank: int, exchange: Exchange) -> None:
        self.rank, self.exchange = rank, exchange
        #: For each turn of the loop, by rank: the kind of batch, and the ranks' agreement; None if
        #: no rank had anything to run.
        self.ran: list[Any] = []
        self.agreed: list[Any] = []
        choose = self.get_next_disagg_decode_batch_to_run
        self.get_next_disagg_decode_batch_to_run = partial(self.watched, choose)
        self.__dict__.update(
            require_mlp_sync=True,
            attn_tp_size=1,
            attn_cp_size=1,
            offload_tags=set(),
            tp_group=SimpleNamespace(cpu_group=self),
        )
        self.server_args.__dict__.update(
            enable_dp_attention=True, dp_size=2, moe_dense_tp_size=None, enable_dp_lm_head=False
        )

    def gather(self, into: torch.Tensor, own: torch.Tensor) -> None:
        """Gather as ``all_gather_into_tensor`` does. Both ranks are in the same turn."""
        both = self.exchange.meet(self.rank, f"sync in turn {self.turns}", own.clone())
        into.copy_(torch.cat(both))

    def enqueue(self, req: Any, **options: Any) -> Any:
        req.logprob_start_len = -1  # as SGLang does
        return super().enqueue(req, **options)

    def watched(self, choose: Callable[[], Any]) -> Any:
        """Run ``choose`` as ``get_next_disagg_decode_batch_to_run``, and record its batch."""
        batch = choose()
        kind = agreed = None
        if batch is not None:
            mode = batch.forward_mode
            kind = CHUNK if mode.is_extend() else STEP if mode.is_decode() else IDLE
            split = batch.tbo_split_seq_index is not None
            agreed = batch.is_extend_in_batch, batch.global_forward_mode, split
        self.ran.append(self.exchange.meet(self.rank, f"turn {self.turns}", kind))
        self.agreed.append(self.exchange.meet(self.rank, f"batch in turn {self.turns}", agreed))
        self.turns += 1
        return batch

    def stream_output_generation(self, *arguments: Any, **options: Any) -> None:
        """Stream nothing: there is no tokenizer."""

    def run_batch(self, batch: Any, *arguments: Any) -> Any:
        if batch.forward_mode.is_idle():
            return SimpleNamespace(copy_done=None, delay_sample_func=None)
        return super().run_batch(batch, *arguments)


def to_the_end(rank: Any, script: Iterator[None], turns: int) -> Iterator[None]:
    """Run ``script``, then idle up to turn ``turns``, so that all ranks end in the same turn."""
    yield from script
    while rank.turns < turns:
        rank.check_now()
        yield
    # Ranks that do not gather run empty batches for ever.
    is_idle = rank.nothing_waits and not rank.result_queue
    assert is_idle or envs.SGLANG_SCHEDULER_SKIP_ALL_GATHER.get(), "the rank is not idle"


def play(
    monkeypatch: pytest.MonkeyPatch, ranks: Sequence[Any], scripts: Sequence[Any], turns: int
) -> None:
    """Run both loops, each on a thread, for ``turns`` turns."""
    monkeypatch.setattr(
        scheduler_dp_attn_mixin,
        "get_tp_group",
        lambda: SimpleNamespace(active_ranks_cpu=torch.ones(2)),
    )
    monkeypatch.setattr(
        dist, "all_gather_into_tensor", lambda into, own, group: group.gather(into, own)
    )
    exchange = Exchange()
    for number, rank in enumerate(ranks):
        rank.join(number, exchange)

    def run(number: int) -> None:
        try:
            ranks[number].play(to_the_end(ranks[number], scripts[number](ranks[number]), turns))
        except BaseException:
            exchange.abort()
            raise

    with ThreadPoolExecutor(2) as threads:
        futures = [threads.submit(run, number) for number in RANKS]
    errors = [error for future in futures if (error := future.exception())]
    # The other rank gets a broken barrier.
    for error in sorted(errors, key=lambda e: isinstance(e, threading.BrokenBarrierError)):
        raise error


def talk(number: int, turns: int, new: int = 12) -> Any:
    """Return a script: a text and ``turns`` turns after it, each sent after the last answer."""

    def script(rank: Any) -> Iterator[None]:
        text = ids(number, 40)
        for turn in range(turns + 1):
            req = rank.submit(text, new=new)
            while not req.finished():
                yield
            text = [*text, *req.output_ids, *ids(number + turn, 61)]

    return script


def nothing(rank: Any) -> Iterator[None]:
    """A script without requests."""
    yield from ()


def ranks() -> list[Any]:
    return [Rank(16, 2048, local=100, chunk=32) for _ in RANKS]


@pytest.mark.hazard("ranks-disagree-on-prefix")
@pytest.mark.parametrize("seed", range(2))
def test_random_requests_on_both_ranks(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a rank that misses a step in which another one computes a chunk, and against
    wrong slots or answers because of its empty batch."""
    pair = ranks()
    scripts = [partial(random_talks, seed=10 * seed + number) for number in RANKS]
    play(monkeypatch, pair, scripts, 500)
    ran = {frozenset(step) for step in pair[0].ran}
    assert {CHUNK, IDLE} in ran and {STEP, IDLE} in ran and {CHUNK, STEP} in ran
    assert all(rank.local_turns.telemetry.by("decode_turns")["local", "short"] for rank in pair)


def test_a_chunk_of_one_rank_is_one_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against chunks of several ranks in step after step, which together would delay the
    running requests of all of them, and against a chunk of a rank without requests that counts as
    delaying none."""
    pair = ranks()

    def late(rank: Any) -> Iterator[None]:
        yield
        yield from talk(2, 3, new=2)(rank)

    play(monkeypatch, pair, [talk(1, 3, new=40), late], 500)
    ran = [set(step) for step in pair[0].ran]
    assert sum(CHUNK in step for step in ran) >= 12
    for before, after in zip(ran, ran[1:], strict=False):
        assert not (CHUNK in before and CHUNK in after)


def test_a_rank_that_is_alone_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against chunks that wait for decode steps of ranks with nothing to run: only one turn
    of the loop without a batch lies between them."""
    pair = ranks()

    def script(rank: Any) -> Iterator[None]:
        yield from talk(1, 0, new=2)(rank)
        rank.submit([*rank.submitted[0].origin_input_ids, *ids(5, 80)], new=2)

    play(monkeypatch, pair, [script, nothing], 60)
    ran = [step[0] for step in pair[0].ran]
    chunks = [turn for turn, what in enumerate(ran) if what == CHUNK]
    assert ran[chunks[-3] : chunks[-1] + 3] == [CHUNK, None, CHUNK, None, CHUNK, None, STEP]


def test_a_delay_by_another_rank_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against gaps between tokens that seem to contain no chunk, so that no breach of the
    bound is counted, and against decode steps that seem as long as a chunk of another rank."""
    pair = ranks()
    turns = pair[0].local_turns
    gaps, steps = list[bool](), list[float]()
    monkeypatch.setattr(
        local_chunks,
        "observe_gap",
        lambda stats, seconds, chunk, bound: gaps.append(chunk) if stats is turns.telemetry else 0,
    )
    monkeypatch.setattr(turns.measured, "add_step", steps.append)
    play(monkeypatch, pair, [talk(1, 0, new=60), talk(2, 2, new=4)], 300)
    ran = pair[0].ran
    beside = ran.count([STEP, CHUNK])
    assert beside >= 4
    own = sum(what[0] == CHUNK for what in ran[max(0, ran.index([STEP, CHUNK]) - 2) :])
    assert own == 0, "only the other rank has chunks while this one decodes"
    assert sum(gaps) == beside
    assert len(steps) == sum(what[0] == STEP and what[1] != CHUNK for what in ran)


def test_a_pause_on_both_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a pause between a chunk and its result, with a chunk on one rank and an empty
    batch on the other: retracted requests would not resume, or one rank would wait for the
    other."""
    pair = ranks()

    def script(rank: Any) -> Iterator[None]:
        rng = random.Random(3)
        talks = random_talks(rank, 40 + rank.rank)
        for turn, _ in enumerate(talks):
            if turn in (30, 60, 90):
                mode = rng.choice(["retract", "abort", "in_place"])
                rank.pause_generation(PauseGenerationReqInput(mode=mode))
            if turn in (36, 66, 96):
                rank.continue_generation(ContinueGenerationReqInput())
            yield

    play(monkeypatch, pair, [script, script], 500)


@pytest.mark.parametrize("overlap", [True, False])
def test_two_batch_overlap_and_deepep(overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against ranks that split a step in two batches while others do not, and against ranks
    of which one sends tokens to experts as for a prompt and another as for a decode step: both
    would wait for each other for ever. SGLang agrees on that in the same way for its aggregated
    servers; ``auto`` is DeepEP's mode that does not depend on the batch."""
    monkeypatch.setattr(two_batch_overlap, "is_tbo_enabled", lambda: overlap)
    monkeypatch.setattr(two_batch_overlap, "get_moe_a2a_backend", lambda: MoeA2ABackend.DEEPEP)
    monkeypatch.setattr(two_batch_overlap, "get_deepep_mode", lambda: DeepEPMode.AUTO)
    pair = ranks()
    play(monkeypatch, pair, [talk(1, 3, new=20), talk(2, 3, new=7)], 500)
    found = set()
    for ran, (first, second) in zip(pair[0].ran, pair[0].agreed, strict=True):
        assert first == second
        if first is None:
            continue
        is_extend, _, is_split = first
        assert is_extend == (CHUNK in ran)
        mode = DeepEPMode.AUTO.resolve(is_extend)
        assert mode == (DeepEPMode.NORMAL if CHUNK in ran else DeepEPMode.LOW_LATENCY)
        assert is_split == (overlap and set(ran) != {CHUNK, STEP})
        found.add(frozenset(ran))
    assert {CHUNK, STEP} in found and {CHUNK, IDLE} in found and {STEP} in found


# ---- reasons of refusals ----


def test_ranks_that_do_not_gather_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the reason why ``SGLANG_SCHEDULER_SKIP_ALL_GATHER=1`` is refused: of two ranks in one
    step, the one with a chunk sends tokens to experts as for a prompt, the other as for a decode
    step."""
    monkeypatch.setenv("SGLANG_SCHEDULER_SKIP_ALL_GATHER", "1")
    pair = ranks()
    play(monkeypatch, pair, [talk(1, 3, new=20), talk(2, 3, new=7)], 300)
    steps = zip(pair[0].ran, pair[0].agreed, strict=True)
    both = [(ran, agreed) for ran, agreed in steps if set(ran) == {CHUNK, STEP}]
    assert both
    for ran, agreed in both:
        modes = {what: DeepEPMode.AUTO.resolve(of[0]) for what, of in zip(ran, agreed, strict=True)}
        assert modes == {CHUNK: DeepEPMode.NORMAL, STEP: DeepEPMode.LOW_LATENCY}


@pytest.mark.parametrize(
    "kind", [MooncakeEPDispatcher, NixlEPDispatcher], ids=lambda each: each.__name__
)
def test_experts_that_are_reached_by_decode_steps_only(kind: Any) -> None:
    """Guards the reason why ``--moe-a2a-backend mooncake`` and ``nixl`` are refused: SGLang raises
    for a chunk."""
    dispatcher = kind.__new__(kind)
    dispatcher.deepep_mode, dispatcher._low_latency_dispatcher = DeepEPMode.AUTO, "decode"
    for is_chunk in (False, True):
        set_is_extend_in_batch(is_chunk)
        try:
            if is_chunk:
                with pytest.raises(NotImplementedError):
                    dispatcher._get_impl()
            else:
                assert dispatcher._get_impl() == "decode"
        finally:
            set_is_extend_in_batch(False)


def test_deepep_for_decode_steps_has_no_room_for_a_chunk() -> None:
    """Guards the reason why ``--deepep-mode low_latency`` is refused: a chunk is sent like a decode
    step, and is longer than the buffers for that."""
    assert DeepEPMode.LOW_LATENCY.resolve(is_extend_in_batch=True) == DeepEPMode.LOW_LATENCY
    longest = envs.SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK.get()
    assert longest < environment.LOCAL_CHUNK.default
