"""SGLang's own overlap loop on a ``Decoder``, with the worst timing of a device and a peer.

A step's writes happen when the loop waits for its result, which is the latest time for a device.
Prefill writes as soon as pages are announced, which is the earliest time.

With spec v2 (``Ahead``) a step is launched before the result of the last one is known; SGLang's own
batch, draft input and future map run. A step first looks up in its requests' rows which slots it
writes, verifies, and is awaited again before the draft model runs over the accepted tokens.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from component.decode import drafting, kv
from component.decode.actions import TOKENS
from component.decode.checks import check
from component.decode.decoder import Decoder
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.delta.decode.request import record_of
from sglang.srt.managers.overlap_utils import FutureMap
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.speculative.eagle_info import EagleDraftInput

TOKEN = 2
#: SGLang's class without the package's mixins.
_STOCK = [each for each in Scheduler.__mro__ if "run_batch" in vars(each)][-1]


class Stop(Exception):
    """Ends the loop."""


class Event:
    """Mark the end of work on a stream; waiting for it waits for all earlier work."""

    def __init__(self, stream: deque[Event], work: Callable[[], None]) -> None:
        self._stream, self._work = stream, work
        stream.append(self)

    def synchronize(self) -> None:
        while self in self._stream:
            self._stream.popleft()._work()


class Overlapped(Decoder):
    """A decode scheduler with a loop that runs a script: a generator that yields once a turn."""

    script: Iterator[None]

    def __init__(self, page: int, tokens: int, **options: Any) -> None:
        super().__init__(page, tokens, **options)
        self.enable_overlap, self.result_queue = True, deque()
        self.stream: deque[Event] = deque()
        for pool in (self.pool, self.draft_pool):
            if pool is not None:
                pool.get_cpu_copy = self._after_all_work(pool.get_cpu_copy)
                pool.load_cpu_copy = self._after_all_work(pool.load_cpu_copy)
        #: Number of announcements before the result of the step in flight, and number of all.
        self.at_once = self.told = 0

    def _after_all_work(self, copy: Callable[..., Any]) -> Callable[..., Any]:
        """Synchronize a copy with the device, as SGLang's copies to and from the CPU do."""

        def synchronized(*arguments: Any) -> Any:
            if self.stream:
                self.stream[-1].synchronize()
            return copy(*arguments)

        return synchronized

    def play(self, script: Iterator[None]) -> None:
        self.script = script
        with pytest.raises(Stop):
            self.event_loop_overlap_disagg_decode()

    def check_now(self) -> None:
        """Check invariants between two turns, if no step is in flight whose writes are missing."""
        if not self.result_queue:
            check(self)

    def recv_requests(self) -> list[Any]:
        for _ in self.script:
            return []
        raise Stop

    def process_input_requests(self, recv_reqs: list[Any]) -> None:
        """Do nothing: the script submits requests."""

    def process_decode_queue(self) -> None:
        super().process_decode_queue()
        self.at_once += self.deliver_all()

    def process_batch_result(self, batch: Any, result: Any) -> None:
        super().process_batch_result(batch, result)
        self.deliver_all()

    def deliver_all(self) -> int:
        """Let prefill write all announced pages; return the number of rooms."""
        told = [req for req in self.in_transfer if self.room(req).poll() == KVPoll.Transferring]
        for req in told:
            self.deliver(req, first_token=self.first_token(req))
        self.told += len(told)
        return len(told)

    def first_token(self, req: Any) -> int:
        """Return prefill's first token."""
        return TOKEN

    def stream_output(self, reqs: list[Any], *arguments: Any, **options: Any) -> None:
        # The step in flight streams ended requests again; SGLang's own method skips them.
        new = [req for req in reqs if not req.finished_output]
        for req in new:
            req.finished_output = req.finished()
        super().stream_output(new)

    def self_check_during_idle(self) -> None:
        """Do nothing: the test checks."""

    def run_batch(self, batch: ScheduleBatch, *arguments: Any) -> Any:
        if batch.forward_mode.is_extend():
            return self._run_chunk_later(batch)
        writes = []
        for req, slot in zip(batch.reqs, batch.out_cache_loc.clone(), strict=True):
            ids = req.origin_input_ids + req.output_ids
            ids += [TOKEN] * (req.kv_committed_len - len(ids))  # sampled, but not read back yet
            tag = kv.tags(ids, req.extra_key, weights=record_of(req).generation)[-1]
            writes.append((slot[None], tag))
        batch.output_ids = batch.seq_lens.new_full((len(batch.reqs),), TOKEN)

        def end_of_step() -> None:
            for slot, tag in writes:
                kv.write(self.pool, slot, [tag])

        return SimpleNamespace(
            copy_done=Event(self.stream, end_of_step),
            logits_output=None,
            next_token_ids=batch.output_ids,
            can_run_cuda_graph=False,
            num_accepted_tokens=0,
            delay_sample_func=None,
        )

    def _run_chunk_later(self, batch: ScheduleBatch) -> Any:
        """Launch a chunk that is written when the loop waits for its result, like decode steps."""
        result = self.chunk_result([TOKEN] * len(batch.reqs))
        batch.output_ids = result.next_token_ids
        result.copy_done = Event(self.stream, self.chunk_of(batch))
        return result


def until_idle(decoder: Overlapped) -> Iterator[None]:
    for _ in range(2000):
        decoder.check_now()
        if decoder.nothing_waits and not decoder.result_queue:
            return
        yield
    raise AssertionError("not idle")


def random_talks(decoder: Overlapped, seed: int) -> Iterator[None]:
    """Run talks with turns at random times; some clients leave."""
    rng = random.Random(seed)
    talks = [[rng.randrange(TOKENS) for _ in range(rng.randrange(5, 60))] for _ in range(4)]
    for _ in range(150):
        if rng.random() < 0.4 and len(decoder.queued) < 4:
            talk = rng.choice(talks)
            talk += [rng.randrange(TOKENS) for _ in range(rng.randrange(1, 40))]
            del talk[160:]
            decoder.submit(talk, new=rng.choice([1, 2, 9, 20]))
        if rng.random() < 0.08 and decoder.submitted:
            decoder.abort(rng.choice(decoder.submitted[-6:]).rid)
        yield
        decoder.check_now()
    yield from until_idle(decoder)


# ---- spec v2 ----


class Ahead(Overlapped):
    """A decode scheduler with spec v2. ``steps``: of the draft model.

    The target's answer to a request is fixed (``said``); the number of right drafts of a step
    depends on the request and the position.
    """

    def __init__(self, page: int, tokens: int, *, steps: int, **options: Any) -> None:
        super().__init__(page, tokens, steps=steps, **options)
        device = torch.device("cpu")
        self.future_map = FutureMap(self.max_running_requests, 0, 1024, device, self.spec_algorithm)
        self.draft_worker = SimpleNamespace(speculative_num_draft_tokens=steps + 1)
        #: The device's texts of the last launched step's requests.
        self._texts: dict[str, list[int]] = {}

    @staticmethod
    def said(req: Any, place: int) -> int:
        """Return token ``place`` of the answer."""
        return (int(req.rid[1:]) * 7 + place**2) % 50

    def first_token(self, req: Any) -> int:
        return self.said(req, 0)

    def answers_are_right(self) -> None:
        """Check that each request that was not aborted has its whole text."""
        for req in self.submitted:
            new = req.sampling_params.max_new_tokens
            text = [self.said(req, place) for place in range(new)]
            aborted = (
                req.finished_reason is None or req.finished_reason.to_json()["type"] == "abort"
            )
            assert aborted or req.output_ids[:new] == text

    def check_now(self) -> None:
        """Check the processed tokens, at any time."""
        check(self)

    def run_batch(self, batch: ScheduleBatch, *arguments: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:  # SGLang's own method, without mixins
            patch.setattr(_STOCK, "run_batch", lambda self, batch, *_: self.launch(batch))
            return super(Overlapped, self).run_batch(batch)  # Overlapped's is another device

    def launch(self, batch: ScheduleBatch) -> Any:
        """Put a step onto the stream; return the result of SGLang's ``run_batch``."""
        self.forward_ct += 1
        if batch.forward_mode.is_extend():
            return self._launch_chunk(batch)
        reqs = list(batch.reqs)
        # In its first step a request drafts from its prompt's start.
        starts = self.future_map.hidden_states_buf[batch.spec_info.future_indices.indices]
        for req, start in zip(reqs, starts[:, 0].tolist(), strict=True):
            assert start == (0 if req.rid in self._texts else req.bootstrap_room)
        known = {req.rid: self._texts.get(req.rid, _ids(req)) for req in reqs}
        self._texts = {rid: list(text) for rid, text in known.items()}
        rows, lens = batch.req_pool_indices.clone(), batch.seq_lens.clone()
        assert lens.tolist() == [len(text) - 1 for text in known.values()]
        assert len(batch.spec_info.future_indices.indices) == len(reqs)
        launched = _Step(self, reqs, rows, lens, self._texts)
        start = EagleDraftInput(
            topk_p=torch.ones(len(reqs), 1),
            topk_index=torch.zeros(len(reqs), 1, dtype=torch.int64),
            hidden_states=torch.zeros(len(reqs), 1),
            verified_id=torch.zeros(len(reqs), dtype=torch.int32),
            new_seq_lens=launched.ends,
            verify_done=Event(self.stream, launched.verify),
        )
        future = self.future_map.alloc_future_indices(len(reqs))
        self.future_map.store_to_map_for_new_batch(future, start)
        start.future_indices = future
        batch.spec_info, batch.seq_lens = start, start.new_seq_lens
        batch.output_ids = -future.indices
        return SimpleNamespace(
            copy_done=Event(self.stream, launched.extend_draft),
            logits_output=None,
            next_token_ids=launched.tokens.view(-1),
            accept_lens=launched.accepted,
            next_draft_input=start,
            can_run_cuda_graph=False,
            num_accepted_tokens=0,
            delay_sample_func=None,
        )

    def _launch_chunk(self, batch: ScheduleBatch) -> Any:
        """Launch a chunk of local turns; before the last chunk the target's token is arbitrary."""
        tokens = [self.said(req, 0) for req in batch.reqs]
        end_of_chunk, drafts = self.chunk_of(batch), drafting.extend(batch, tokens)

        def compute() -> None:
            end_of_chunk()
            for slots, values in drafts:
                kv.write(self.draft_pool, slots, values)

        start, result = batch.spec_info, self.chunk_result(tokens)
        result.copy_done, result.next_draft_input = Event(self.stream, compute), start
        future = self.future_map.alloc_future_indices(len(tokens))
        self.future_map.store_to_map_for_new_batch(future, start)
        start.future_indices = future
        batch.seq_lens, batch.output_ids = start.new_seq_lens, -future.indices
        return result


class _Step:
    """A step's work on the device, in two parts."""

    def __init__(
        self,
        decoder: Ahead,
        reqs: list[Any],
        rows: torch.Tensor,
        lens: torch.Tensor,
        texts: dict[str, list[int]],
    ) -> None:
        self._decoder, self._reqs, self._rows, self._lens = decoder, reqs, rows, lens
        self._texts = texts
        width = decoder.steps + 1
        self.ends = torch.zeros_like(lens)
        self.accepted = torch.zeros(len(reqs), dtype=torch.int32)
        self.tokens = torch.full((len(reqs), width), -1)
        self._weights = [record_of(req).generation for req in reqs]

    def verify(self) -> None:
        """Look up slots, draft, verify."""
        decoder, width = self._decoder, self._decoder.steps + 1
        table = decoder.req_to_token_pool.req_to_token
        self._slots = table[self._rows[:, None], self._lens[:, None] + torch.arange(width)].long()
        for at, req in enumerate(self._reqs):
            text, slots = self._texts[req.rid], self._slots[at]
            place = len(text) - len(req.origin_input_ids)
            right = (place + int(req.rid[1:])) % width
            said = [decoder.said(req, place + ahead) for ahead in range(right + 1)]
            drafts = [*said[:right], *[63] * (width - 1 - right)]
            kv.write(decoder.draft_pool, slots[:-1], [drafting.TRANSIENT] * (width - 1))
            kv.write(decoder.pool, slots, self._tags(at, [*text, *drafts])[-width:])
            text += said
            self.tokens[at, : len(said)] = torch.tensor(said)
            self.accepted[at] = len(said)
        self.ends.copy_(self._lens + self.accepted)

    def extend_draft(self) -> None:
        """Run the draft model over the accepted tokens, and over the rest of the slots."""
        for at, req in enumerate(self._reqs):
            right = self._tags(at, self._texts[req.rid])[int(self._lens[at]) + 1 :]
            count = len(right)
            kv.write(self._decoder.draft_pool, self._slots[at][:count], right)
            kv.write(self._decoder.draft_pool, self._slots[at][count:], [drafting.TRANSIENT])

    def _tags(self, at: int, ids: list[int]) -> list[int]:
        return kv.tags(ids, self._reqs[at].extra_key, weights=self._weights[at])


def _ids(req: Any) -> list[int]:
    return list(req.origin_input_ids + req.output_ids)
