"""Turns that decode computes itself, beside the other work of SGLang's loop."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from component.decode.decoder import Decoder
from component.decode.overlapped import Ahead, Overlapped, until_idle
from component.decode.steps import PROMPT, admit, finish, ids, serve, tick, turn
from sglang.srt.disaggregation.policy.pace import Limits
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.lora.lora_manager import LoRAManager
from sglang.srt.managers.overlap_utils import FutureMap
from sglang.srt.model_executor import forward_batch_info

PAGES = pytest.mark.parametrize("page", [1, 16])
NEW = list(range(50))


def decoder_of(page: int, kind: type[Decoder] = Decoder) -> Any:
    """Return a decode server with the history in its tree."""
    decoder = kind(page, 1024, local=200, chunk=32)
    serve(decoder, PROMPT)
    return decoder


def test_each_batch_is_prepared() -> None:
    """Guards against expert parallelism that does not know a chunk's length: its rank would wait in
    a collective for ranks that have no such step."""
    decoder = decoder_of(16)
    chunks: list[bool] = []

    def prepare(batch: Any) -> Any:
        if batch is not None:
            chunks.append(batch.forward_mode.is_extend())
        return batch

    decoder.require_mlp_sync, decoder.prepare_mlp_sync_batch = True, prepare
    decoder.submit(PROMPT + NEW)
    turn(decoder, 4)
    assert chunks == [True, True, False, False]
    finish(decoder)


@pytest.mark.parametrize("steps", [0, 3])
def test_ranks_agree_once_a_turn(steps: int) -> None:
    """Guards against a second collective in each step with a draft model and expert parallelism.
    Only data parallel ranks must know of chunks before they choose a decode step."""
    decoder = Decoder(16, 1024, local=200, chunk=32, steps=steps)
    serve(decoder, PROMPT)
    calls: list[Any] = []

    def prepare(batch: Any) -> Any:
        calls.append(batch)
        return batch

    decoder.require_mlp_sync, decoder.prepare_mlp_sync_batch = True, prepare
    decoder.server_args.enable_dp_attention = False
    decoder.submit(PROMPT + NEW)
    for _ in range(4):
        before = len(calls)
        turn(decoder)
        assert len(calls) == before + 1
    finish(decoder)


# ---- places in the running batch ----


def endless_arrivals(decoder: Overlapped) -> Iterator[None]:
    """Run two turns in one chunk while more requests arrive from prefill than there are places; two
    of them never end in the same step."""
    first = decoder.submit(ids(0, 3), new=200)
    while not first.output_ids:
        yield
    two = [decoder.submit(ids(number, 5), new=2) for number in (1, 2)]
    answers = itertools.chain([5, 9], itertools.repeat(8))
    for number in itertools.count(3):
        if len([*decoder.queued, *decoder.in_transfer, *decoder.waiting_queue]) < 4:
            decoder.submit(ids(number, 40), new=next(answers))
        yield
        assert len(decoder.running_batch.reqs) <= 3
        if all(req.finished() for req in two):
            break
        assert number < 48, "the two wait for as long as requests arrive"
    yield from until_idle(decoder)


def test_arrivals_do_not_take_every_place() -> None:
    """Guards against turns that have their first token and then stall for ever: each free place
    goes to a request that prefill has sent, and the turns need two at once."""
    decoder = Overlapped(16, 1024, local=30, chunk=16)
    decoder.max_running_requests = 3
    decoder.play(endless_arrivals(decoder))
    finish(decoder)
    assert decoder.local_turns.telemetry.by("decode_turns")["remote", "long"] >= 4


def test_who_has_come_from_prefill_waits_for_one_chunk() -> None:
    """Guards against requests from prefill that stall until a long turn is computed to its end,
    because no running request makes chunks alternate with decode steps."""
    decoder = decoder_of(16)
    (remote,) = admit(decoder, ids(1, 201), new=8)
    long = decoder.submit(PROMPT + [9] * 160)  # five chunks
    turn(decoder)
    decoder.deliver(remote)
    turn(decoder)
    assert remote in decoder.running_batch.reqs and len(remote.output_ids) == 2
    assert not long.output_ids
    finish(decoder)


@pytest.mark.parametrize("others", [0, 1])
def test_a_turn_keeps_its_place_from_its_first_chunk_on(others: int) -> None:
    """Guards against a long turn with chunks that each wait for the end of another answer, because
    requests from prefill take its place; and against one that keeps the only place and blocks all
    others."""
    decoder = decoder_of(16)
    decoder.max_running_requests = 1 + others
    for number in range(others):
        decoder.submit(ids(number, 9), new=60)
    turn(decoder, 2)
    assert len(decoder.running_batch.reqs) == others
    long = decoder.submit(PROMPT + [9] * 160)  # five chunks
    while long.rid not in decoder.computed:
        turn(decoder)
    remote = admit(decoder, *(ids(number, 201) for number in (3, 4, 5)), new=4)
    for req in remote:
        decoder.deliver(req)
    while not long.output_ids:
        turn(decoder)
        assert not set(remote) & set(decoder.running_batch.reqs)
    turn(decoder, 2)
    assert long in decoder.running_batch.reqs
    finish(decoder)


def test_no_turn_is_computed_here_without_a_place() -> None:
    """Guards against a turn that waits for a place and then leaves it empty while it is computed,
    although prefill would have computed it by then."""
    decoder = Decoder(16, 4096, limits=Limits(200, 32))
    decoder.max_running_requests = 2
    running = decoder.submit(ids(1, 20), new=200)
    turn(decoder, 4)
    assert running in decoder.running_batch.reqs and not decoder.in_transfer
    first, second = decoder.submit(ids(2, 190), new=4), decoder.submit(ids(3, 190), new=4)
    turn(decoder)
    assert decoder.in_transfer == [second], "the first one has the last place"
    decoder.deliver(second)
    while not first.output_ids:
        turn(decoder)
    finish(decoder)


@PAGES
def test_a_turn_that_waits_for_its_place(page: int) -> None:
    """Guards against a computed turn whose place in SGLang's ring of draft inputs belongs to
    another step by the time that it runs."""
    decoder = Ahead(page, 2048, steps=3, local=30, chunk=16)
    device = decoder.future_map.device
    decoder.future_map = FutureMap(4, 0, 1024, device, decoder.spec_algorithm)  # a ring of 12
    decoder.max_running_requests = 3

    def play() -> Iterator[None]:
        long = [decoder.submit(ids(number, 40), new=90) for number in (1, 2, 3)]
        while len(decoder.running_batch.reqs) < 2:
            yield
        decoder.max_running_requests = 5  # there is room for a chunk, and then there is none
        late = decoder.submit(ids(4, 9), new=9)
        while not late.output_ids:
            yield
            if decoder.chunks:
                decoder.max_running_requests = 3
        for _ in range(8):
            yield
            assert len(late.output_ids) == 1
        assert not any(req.finished() for req in long)
        decoder.max_running_requests = 5
        yield from until_idle(decoder)

    decoder.play(play())
    decoder.answers_are_right()
    finish(decoder)


# ---- other events ----


class Slices:
    """A request's trace, which checks that a slice that ends was opened last."""

    tracing_enable = True

    def __init__(self) -> None:
        self.open: list[str] = []
        self.added: list[tuple[str, ...]] = []

    def trace_slice_start(self, name: str, *_: Any) -> None:
        self.open.append(name)

    def trace_slice_end(self, name: str, *_: Any) -> None:
        assert self.open.pop() == name

    def trace_slice(self, added: Any) -> None:
        self.added.append((*self.open, added.slice_name))

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


@pytest.mark.parametrize("new", [20, 80])
def test_traces(new: int) -> None:
    """Guards against a trace without the slice of decode, and against SGLang's warning for each
    turn: the slice would be closed as one of prefill."""
    decoder = decoder_of(16)
    req = decoder.submit(PROMPT + [9] * new)
    req.time_stats.disagg_mode = DisaggregationMode.DECODE
    req.time_stats.trace_ctx = slices = Slices()
    finish(decoder)
    assert slices.open == ["decode_forward"]
    last = "prefill_forward" if new == 20 else "chunked_prefill"
    assert {("decode_forward", last), ("decode_forward", "decode_loop")} <= set(slices.added)


def test_an_aborted_turn_computes_no_further_chunk() -> None:
    """Guards against a long turn that is computed to its end although its client left: while no
    request runs, each chunk is launched before the result of the previous one."""
    decoder = Overlapped(16, 1024, local=200, chunk=16)

    def leave() -> Iterator[None]:
        req = decoder.submit(ids(1, 160))
        yield
        decoder.abort(req.rid)
        for _ in range(12):
            yield

    decoder.play(leave())
    assert decoder.chunks == [16]
    finish(decoder)


def test_a_chunk_is_measured_to_its_end() -> None:
    """Guards against the time of a launch that counts as the time of a chunk: without overlap
    scheduling a device still computes when its launch has returned."""
    decoder = Decoder(16, 4096, limits=Limits(2000, 32), costs=None, device="cuda")

    def end_of_chunk() -> None:
        decoder.now += 3.0

    stream = SimpleNamespace(synchronize=end_of_chunk)
    decoder.device_module = SimpleNamespace(current_stream=lambda: stream)
    decoder.submit(ids(1, 640), new=1)
    turn(decoder, 20)
    assert decoder.local_turns.measured.chunk.at(32) == pytest.approx(3.0)
    finish(decoder)


# ---- adapters ----

MOST = 2


class Adapted(Decoder):
    """A server with memory for two adapters' weights; "no adapter" counts as one, as in SGLang."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        limits = SimpleNamespace(max_loras_per_batch=MOST, num_pinned_loras=0)
        manager = SimpleNamespace(
            validate_lora_batch=partial(LoRAManager.validate_lora_batch, limits)
        )
        self.enable_lora = True
        self.tp_worker.model_runner = SimpleNamespace(lora_manager=manager)

    def _run_chunk(self, batch: Any, next_token: Any) -> None:
        self.fetch_adapters(batch)
        super()._run_chunk(batch, next_token)

    def _forward(self, batch: Any, next_token: Any) -> Any:
        self.fetch_adapters(batch)
        return super()._forward(batch, next_token)

    @staticmethod
    def fetch_adapters(batch: Any) -> None:
        """Check the number of adapters, as SGLang does before each forward pass."""
        assert len({req.lora_id for req in batch.reqs}) <= MOST


@pytest.mark.hazard("tenants-share")
@PAGES
def test_adapters(page: int) -> None:
    """Guards against KV of another adapter, and against more adapters in a batch than there is
    memory for, which ends the server."""
    decoder = decoder_of(page, Adapted)
    held = []
    for number in range(2):
        prompt = [*PROMPT, number]
        reqs = [decoder.submit(prompt, new=12, lora_id=of) for of in ["a", "b", None, "c"]]
        turn(decoder, 40)
        finish(decoder)
        assert [req.output_ids for req in reqs] == [[2] * 12] * 4
        held.append([req.cached_tokens for req in reqs])
    assert decoder.local_turns.telemetry.by("decode_turns")["local", "short"] == 9
    # At first only requests without an adapter hit the history.
    assert held == [[0, 0, 80, 0], [80] * 4]


@PAGES
def test_adapters_of_what_prefill_sends(page: int) -> None:
    """Guards against the same if prefill computes every prompt, and decode resumes requests."""
    decoder = Adapted(page, 1024)
    reqs = [
        decoder.submit(ids(number, 20), new=12, lora_id=of)
        for number, of in enumerate(["a", "b", "c", None, "a", "d"])
    ]
    for _ in range(4):
        for req in decoder.in_transfer:
            decoder.deliver(req)
        turn(decoder)
    decoder.retract()
    finish(decoder)
    assert all(req.finished() for req in reqs)


@pytest.mark.parametrize("leave", [False, True])
def test_a_turn_of_another_adapter_waits_for_its_place(leave: bool) -> None:
    """Guards against a turn that joins a batch without room for its adapter; and, when its client
    leaves, against pages, a row and an answer that wait for the end of other answers, and against
    requests from prefill that wait for the place of a turn that is gone."""
    decoder = decoder_of(16, Adapted)
    running = [decoder.submit(ids(number, 9), new=40, lora_id=f"{number}") for number in (1, 2)]
    turn(decoder, 3)
    assert len(decoder.running_batch.reqs) == 2
    late = [decoder.submit([*PROMPT, number], lora_id="3") for number in range(2)]
    while not late[1].output_ids:
        turn(decoder)
    for req in late if leave else ():
        assert not decoder.local_turns.places_for_others
        decoder.abort(req.rid)
        tick(decoder)
        assert req.finished() and req not in decoder.local
    assert bool(decoder.local_turns.places_for_others) == leave
    while not all(req.finished() for req in running):
        assert leave or [req.output_ids for req in late] == [[2]] * 2
        turn(decoder)
    finish(decoder)
    assert [req.output_ids for req in late] == [[2] if leave else [2] * 8] * 2


@pytest.mark.parametrize("overlaps", [False, True])
def test_who_loads_the_adapters_of_a_chunk(overlaps: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the reason why ``--enable-lora-overlap-loading`` is refused: SGLang loads the adapters
    of a batch before it runs, but with the flag its scheduler of prompts does, which does not run
    on a decode server."""
    monkeypatch.setattr(forward_batch_info, "enable_num_token_non_padded", lambda args: False)
    decoder = decoder_of(16, Adapted)
    loaded, prepared = list[Any](), list[Any]()
    decoder.submit([*PROMPT, 7], lora_id="a")
    decoder.tick_queues()
    batch = decoder.get_next_disagg_decode_batch_to_run()
    assert batch.forward_mode.is_extend()
    settings = {"enable_lora": True, "enable_lora_overlap_loading": overlaps}
    runner = SimpleNamespace(
        server_args=SimpleNamespace(**vars(decoder.server_args) | settings),
        lora_manager=SimpleNamespace(
            fetch_new_loras=loaded.append, prepare_lora_batch=prepared.append
        ),
        req_to_token_pool=decoder.req_to_token_pool,
        token_to_kv_pool=decoder.pool,
        attn_backend=None,
        device="cpu",
        use_ngram_embedding=False,
        model_is_mrope=False,
        is_hybrid_swa=False,
    )
    forward_batch_info.ForwardBatch.init_new(batch.get_model_worker_batch(), runner)
    assert loaded == ([] if overlaps else [{"a"}]) and len(prepared) == 1
