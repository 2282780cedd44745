"""Lengths, budget and both pools of a decode server with a draft model (EAGLE, top-k 1)."""

from __future__ import annotations

from collections import Counter, defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from component.decode.checks import check
from component.decode.decoder import Decoder
from component.decode.steps import (
    admit,
    evict_all,
    finish,
    ids,
    land,
    run,
    serve,
    tick,
    turn,
)
from sglang.srt.disaggregation.delta.decode import speculation
from sglang.srt.disaggregation.delta.pages import page_floor
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.mem_cache import radix_cache, utils
from sglang.srt.mem_cache.utils import convert_to_bigram_key

PAGES = [1, 2, 16]


@pytest.mark.parametrize("steps", [0, 1, 3])
@pytest.mark.parametrize("page", PAGES)
def test_a_turn_hits_the_turn_before(page: int, steps: int) -> None:
    """Guards against a next turn that moves the answer of the turn before it, and against lengths
    that are off by one where a text of n tokens shares n-1 slots: with a draft model each turn hits
    whole pages of all but the last committed token."""
    decoder = Decoder(page, 4096, steps=steps)
    text, committed = ids(1, 37), 0
    for number in range(5):
        (req,) = serve(decoder, text, new=10)
        assert req.delta.hit_tokens == max(page_floor(committed - bool(steps), page), 0)
        committed = len(req.origin_input_ids) + len(req.output_ids) - 1
        text = [*req.origin_input_ids, *req.output_ids, *ids(number + 2, 11)]


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("more", [0, 1])
def test_a_whole_prompt_is_never_a_hit(page: int, more: int) -> None:
    """Guards against a slot shared by whom the next token does not fit: of a prompt of whole pages
    at least the last is always moved."""
    decoder = Decoder(page, 1024, steps=1)
    prompt = ids(3, 32 + more)
    for hit in (0, page_floor(32 + more - 1, page)):
        (req,) = serve(decoder, prompt)
        assert req.delta.hit_tokens == hit and len(decoder.rooms[-1].pages) >= 1


class Texts:
    """What the target says: a text of its own for each request, whatever is drafted."""

    def __init__(self) -> None:
        self._asked: dict[str, tuple[int, int]] = {}

    def __call__(self, req: Any) -> int:
        """The next token; of one step, one after the other."""
        length = len(req.output_ids)
        asked, ahead = self._asked.get(req.rid, (length, -1))
        ahead = ahead + 1 if asked == length else 0
        self._asked[req.rid] = length, ahead
        return (int(req.rid[1:]) * 7 + (length + ahead) ** 2) % 50


@pytest.mark.parametrize("local", [0, 200], ids=["from prefill", "computed here"])
@pytest.mark.parametrize("page", PAGES)
def test_retractions_change_no_answer(page: int, local: int) -> None:
    """Guards against a resumed request that starts from another one's hidden state, or from none:
    SGLang keeps none from where it was retracted, so the first step drafts from what came with its
    prompt: prefill sent it, or it is on the request. That draft is lost, and no token is."""

    def answers(*, retract: bool) -> list[list[int]]:
        decoder = Decoder(page, 1024, local=local, chunk=16, steps=3)
        starts: dict[str, list[int]] = defaultdict(list)
        resumes: Counter[str] = Counter()

        def accepted(req: Any) -> int:
            batch = decoder.running_batch
            start = int(batch.spec_info.hidden_states[batch.reqs.index(req), 0])
            if start:  # not what the draft model left there in the step before
                starts[req.rid].append(start)
            return 0 if start else 2

        reqs, said = admit(decoder, *(ids(number, 40) for number in (1, 2, 3)), new=30), Texts()
        for req in decoder.in_transfer:
            decoder.deliver(req)
        for step in range(80):
            tick(decoder)
            if retract and step % 3 == 2:
                decoder.retract()
                resumes.update(req.rid for req in decoder.retracted)
                if step % 6 == 5:
                    evict_all(decoder)
                check(decoder)
            decoder.tick_batch(said, accepted)
            check(decoder)
        finish(decoder)
        assert bool(resumes) == retract
        for req in reqs:
            assert starts[req.rid] == [req.bootstrap_room] * (1 + resumes[req.rid])
        return [req.output_ids for req in reqs]

    assert answers(retract=True) == answers(retract=False)


def test_the_start_of_a_draft_is_the_requests_own() -> None:
    """Guards against views into a metadata slot: the slot is another room's before a request that
    waits for a place in the batch has run."""
    decoder = Decoder(16, 2048, steps=1)
    decoder.max_running_requests = 1
    run(decoder, *(ids(number, 30) for number in range(1, 5)), new=20)
    assert len(decoder.waiting_queue) == 3
    # Their metadata slots are free: other rooms' metadata come.
    metadata = decoder.metadata
    starts = metadata.output_hidden_states, metadata.output_topk_p, metadata.output_topk_index
    for buffer in starts:
        buffer.fill_(7)
    check(decoder)
    finish(decoder)


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize(("steps", "drafts"), [(1, 2), (3, 4), (7, 8), (15, 16), (16, 17)])
def test_a_step_takes_what_sglang_asks_for(page: int, steps: int, drafts: int) -> None:
    """Guards against a budget that lets requests in which SGLang retracts in their first step, and
    aborts if they are alone."""
    decoder = Decoder(page, 1024, steps=steps)
    batch = ScheduleBatch(
        reqs=[object()],
        token_to_kv_pool_allocator=decoder.token_to_kv_pool_allocator,
        spec_algorithm=decoder.spec_algorithm,
        enable_overlap=False,
    )
    assert decoder.server_args.speculative_num_draft_tokens == drafts
    wanted = speculation.step_tokens(decoder, page)
    assert wanted == batch.new_tokens_required_next_decode()


@pytest.mark.parametrize("page", [*PAGES, 64])  # 64: a step takes more than is reserved at most
def test_what_a_step_takes_is_reserved(page: int) -> None:
    """Guards against requests near their end that reserve nothing more, while each step of SGLang's
    wants room for all its drafts; and against sums that take one token a step for granted."""
    decoder = Decoder(page, 2048, steps=3, reserve=16)
    reqs = [decoder.submit(ids(number, 30), new=10 * number) for number in range(1, 5)]
    tick(decoder)
    land(decoder, *reqs)
    claims = decoder.disagg_decode_prealloc_queue._budget.claims
    for step in range(100):
        decoder.tick_batch(accepted=lambda req, step=step: step + int(req.rid[1:]))
        check(decoder)
        batch = decoder.running_batch
        if batch.is_empty():
            break
        batch.filter_batch(v1_spec_info_filtered=True)
        assert claims.reserved >= batch.new_tokens_required_next_decode()
    assert [len(req.output_ids) for req in reqs] == [10, 20, 30, 40]
    finish(decoder)


@pytest.mark.parametrize("page", PAGES)
def test_who_was_admitted_is_not_aborted_for_memory(page: int) -> None:
    """Guards against the same over whole answers: many requests on a small pool all end."""
    decoder = Decoder(page, 640, steps=3, reserve=16)
    reqs = serve(decoder, *(ids(number, 60) for number in range(1, 9)), new=60)
    assert [len(req.output_ids) for req in reqs] == [60] * 8


@pytest.mark.parametrize("page", PAGES)
def test_the_keys_of_a_text_are_built_once(page: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against pairs of a whole text that are made anew at each match, at its adoption and at
    its end: 25 ms each for 100,000 tokens. Of what is in the tree the tree's own are used."""
    built: list[int] = []

    def counted(tokens: list[Any]) -> Any:
        pairs = convert_to_bigram_key(tokens)
        built.append(0 if pairs is tokens else len(pairs))
        return pairs

    for module in (radix_cache, utils):
        monkeypatch.setattr(module, "convert_to_bigram_key", counted)
    decoder = Decoder(page, 640, steps=3)
    prompt = ids(1, 128)
    serve(decoder, prompt[:33])
    holder, other = admit(decoder, ids(2, 300), prompt[:65], new=9)
    (blocked,) = admit(decoder, [*prompt, *ids(3, 200)], new=9)
    assert decoder.queued == [blocked]
    decoder.deliver(other)  # what is blocked is matched once more
    turn(decoder, 4)
    decoder.deliver(holder)
    finish(decoder)
    # At its end a text's last page is looked at again, of which only whole ones were in the tree.
    texts = [len(req.origin_input_ids) + len(req.output_ids) - 1 for req in decoder.submitted]
    assert sum(built) <= sum(length - 1 + page - 1 for length in texts)


@pytest.mark.parametrize("page", PAGES)
def test_a_text_as_long_as_the_pool_is_admitted(page: int) -> None:
    """Guards against a request that waits for a step's room behind the end of the pool, for ever,
    with everybody behind it: SGLang's own bound for prompt and answer is the pool."""
    decoder = Decoder(page, 640, steps=3)
    longest, behind = decoder.submit(ids(1, 637), new=3), decoder.submit(ids(2, 40), new=4)
    finish(decoder)
    assert longest.output_ids and len(behind.output_ids) == 4


def test_who_is_let_in_finds_room_for_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against requests that reserve half of their first step, as of their answers: the pool
    fills up, and the first batch of them retracts some, or aborts them."""
    retractions: list[int] = []
    original = ScheduleBatch.retract_decode
    monkeypatch.setattr(
        ScheduleBatch,
        "retract_decode",
        lambda batch, *args: (retractions.append(1), original(batch, *args))[1],
    )
    decoder = Decoder(16, 640, steps=3)
    # Four pages each, of which the last has room for half of a step and the answer.
    reqs = admit(decoder, *(ids(number, 55) for number in range(1, 13)), new=2)
    tick(decoder)
    assert len(decoder.in_transfer) == 8  # five pages each
    for req in decoder.in_transfer:
        decoder.deliver(req)
    turn(decoder, 2)
    assert not retractions
    finish(decoder)
    assert [len(req.output_ids) for req in reqs] == [2] * 12 and not retractions


@pytest.mark.parametrize("page", PAGES)
def test_waiting_for_a_prefix_is_worth_it(page: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a wait for tokens of which one less can be shared: with so many equal next
    tokens nobody waits, with one more the whole window is a hit."""
    monkeypatch.setenv("SGLANG_DISAGGREGATION_DECODE_PREFIX_WAIT_TOKENS", "16")
    for common, waits in ((16, False), (17, True)):
        decoder = Decoder(page, 1024, steps=1)
        (first,) = admit(decoder, ids(1, 40))
        (second,) = admit(decoder, [*ids(1, common), *[49] * 20])
        assert (second in decoder.queued) == waits
        land(decoder, first)
        tick(decoder)
        assert not waits or decoder.rooms[-1].prefix_len == 16
        finish(decoder)


class Unlike:
    """A pool of other pages."""

    page_size, size = 2, 640


def test_pools_of_other_slots_are_refused() -> None:
    """Guards against a draft model whose pages are not the target's: its KV would land anywhere."""
    decoder = Decoder(16, 640, steps=1)
    speculation.check_draft_pool(decoder.pool, decoder.draft_pool)
    with pytest.raises(ValueError, match="differ in page size"):
        speculation.check_draft_pool(decoder.pool, Unlike())
    indexed = type("Indexed", (Unlike,), {"get_state_buf_infos": lambda self: None})()
    with pytest.raises(ValueError, match="per-request state"):
        speculation.check_draft_pool(decoder.pool, indexed)


# ---- beside turns that are computed here ----


def test_the_place_of_one_that_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a draft input that is cut twice: spec v1 takes who has ended out of it when
    it verifies, and SGLang's loop takes them out of the batch in its next turn."""
    decoder = Decoder(16, 1024, local=200, chunk=64, steps=3)
    decoder.max_running_requests = 3
    first, second = (decoder.submit(ids(number, 20), new=9 * number) for number in (1, 2))
    while not second.output_ids:
        turn(decoder)
    late = decoder.submit(ids(3, 20), new=9)
    while not late.output_ids:
        turn(decoder)
    decoder.max_running_requests = 2
    with monkeypatch.context() as patch:
        patch.setattr(ScheduleBatch, "filter_batch", lambda *_, **__: None)
        while not first.finished():
            decoder.tick_batch()
    assert decoder.running_batch.reqs == [first, second] and decoder.local == [late]
    turn(decoder)
    assert decoder.running_batch.reqs == [second, late]
    finish(decoder)
    assert [len(req.output_ids) for req in (first, second, late)] == [9, 18, 9]


class OnDevice:
    """A tensor that lies on a GPU, as far as a CPU can tell: only its copy can be read."""

    def __init__(self, values: torch.Tensor) -> None:
        self._values = values

    def cpu(self) -> torch.Tensor:
        return self._values.clone()


def test_what_a_draft_starts_from_lies_on_the_host() -> None:
    """Guards against requests that resume together, one computed here and one from prefill: SGLang
    stacks their hidden states where they lie, and those of prefill lie on the host."""
    req = SimpleNamespace()
    fields = {"topk_p": 0.5, "topk_index": 3, "hidden_states": 1.0}
    start = {name: OnDevice(torch.tensor([[value]])) for name, value in fields.items()}
    speculation.own_first_drafts(SimpleNamespace(reqs=[req], spec_info=SimpleNamespace(**start)))
    kept = req.output_topk_p, req.output_topk_index, req.hidden_states_tensor
    assert [each.tolist() for each in kept] == [[0.5], [3], [1.0]]
