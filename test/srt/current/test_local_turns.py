"""Local turns in a real scheduler of 0.5.23: equal answers, chunks, aborts, pauses, memory."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any  # Any: objects of SGLang

import msgspec
import pytest

from current.decode import Decode
from current.environment import DRAFTS, FALCON_H1, GPT_OSS, MOONCAKE, PLAIN, REMAINING, TOGETHER
from current.texts import text
from sglang.srt.disaggregation.common.conn import CommonKVReceiver
from sglang.srt.disaggregation.delta.observability import Telemetry
from sglang.srt.managers import io_struct

CHUNK = 128
LOCAL = {
    "SGLANG_DISAGGREGATION_DECODE_LOCAL_TOKENS": "2000",
    "SGLANG_DISAGGREGATION_DECODE_FALLBACK_PREFILL_TOKENS": "2000",
    "SGLANG_DISAGGREGATION_DECODE_LOCAL_CHUNK": str(CHUNK),
    # A chunk after each decode step, regardless of their costs.
    "SGLANG_DISAGGREGATION_DECODE_LOCAL_SHARE": "1",
}
SHORT = LOCAL | {
    "SGLANG_DISAGGREGATION_DECODE_LOCAL_TOKENS": "100",
    "SGLANG_DISAGGREGATION_DECODE_FALLBACK_PREFILL_TOKENS": "100",
}
ADMITTED = LOCAL | REMAINING
ONE = ("--page-size", "1")
server = pytest.mark.server
SERVERS = {
    "overlap, page 16": server(env=LOCAL),
    "plain, page 16": server(PLAIN, env=LOCAL),
    "page 1, mooncake": server(*ONE, *MOONCAKE, env=ADMITTED),
    "overlap, admission": server(env=ADMITTED),
    "overlap, drafts": server(*DRAFTS, env=ADMITTED),
    "plain, drafts": server(PLAIN, *DRAFTS, env=LOCAL),
    "page 1, drafts": server(*ONE, *DRAFTS, env=LOCAL),
    "overlap, settings": server(*TOGETHER, env=ADMITTED),
    "windows": server(*GPT_OSS, model="gpt_oss", env=ADMITTED),
    "windows, mooncake": server(*GPT_OSS, *ONE, *MOONCAKE, model="gpt_oss", env=LOCAL),
    "sparse, mooncake": server("--page-size", "64", *MOONCAKE, model="deepseek_v32", env=ADMITTED),
    "states": server(*FALCON_H1, model="falcon_h1", env=ADMITTED),
}


def on(*names: str) -> Any:
    """Return the mark of a test that runs on these servers."""
    return pytest.mark.parametrize(
        (), [pytest.param(marks=SERVERS[name], id=name) for name in names]
    )


each = on(*SERVERS)
loops = on("plain, page 16", "overlap, admission", "overlap, drafts", "windows", "states")
families = on("windows", "windows, mooncake", "sparse, mooncake", "states")
short = pytest.mark.server(env=SHORT)
backends = pytest.mark.parametrize(
    (),
    [
        pytest.param(marks=short, id="nixl"),
        pytest.param(marks=pytest.mark.server(*MOONCAKE, env=SHORT), id="mooncake"),
    ],
)


class Peers:
    """Stands for a prefill server that releases rooms, or (not ``known``) does not."""

    def __init__(self, known: bool = True) -> None:
        self._known = known

    def keep(self, reachable: Any) -> list[str]:
        """Keep all of them."""
        return []

    def releases(self, address: str) -> bool:
        """Return True if the prefill server releases rooms."""
        return self._known


class Steps:
    """Records the batches that ran: ``E`` for a chunk, ``d`` for a decode step."""

    def __init__(self, decode: Decode) -> None:
        self.kinds, self.tokens = "", list[int]()
        self._run = decode.scheduler.run_batch

    def reset(self) -> None:
        """Forget the recorded batches."""
        self.kinds, self.tokens = "", []

    def run(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Record and run a batch in place of SGLang's ``run_batch``."""
        is_chunk = batch.forward_mode.is_extend()
        self.kinds += "E" if is_chunk else "d"
        self.tokens += [batch.extend_num_tokens] if is_chunk else []
        return self._run(batch, *args, **kwargs)


@pytest.fixture
def steps(decode: Decode) -> Iterator[Steps]:
    """The recorded batches of this test, with a prefill server that releases rooms."""
    decode.scheduler.lead_turns.peers = Peers()
    decode.bring_prefill()
    decode.frames.clear()
    steps = Steps(decode)
    decode.scheduler.run_batch = steps.run
    yield steps
    del decode.scheduler.run_batch


def later_turns(decode: Decode, added: list[int], new: int) -> tuple[list[Any], list[Any]]:
    """Answer the first turns of sessions on decode. Return the prompts of the second turns, and an
    aggregated server's answers to them."""
    first = [text(200 + 37 * i, seed=i) for i in range(len(added))]
    answers = decode.learn(first, 12)
    second = [[*p, *a, *text(n, seed=n)] for p, a, n in zip(first, answers, added, strict=True)]
    expected = decode.learn(second, new)
    rids = [decode.ask(prompt, 12) for prompt in first]
    decode.finish()
    assert [decode.output(rid) for rid in rids] == answers
    return second, expected


@each
def test_later_turns_are_computed_here_and_answered_as_by_an_aggregated_server(
    decode: Decode, steps: Steps
) -> None:
    """Guards against wrong answers and against two chunks in a row while requests run. Short turns
    share a chunk; one turn arrives while others run; one is longer than a chunk."""
    second, expected = later_turns(decode, [40, 3, 400, 17, 90], 16)
    steps.reset()
    decode.frames.clear()
    rids = [decode.ask(prompt, 16) for prompt in second[:4]]
    decode.step(6)
    rids.append(decode.ask(second[4], 16))
    decode.finish()
    assert [decode.output(rid) for rid in rids] == expected
    assert {tuple(frames[::2]) for frames in decode.frames} == {(b"ABORT", b"LOCAL")}
    assert len(decode.frames) == 5 and max(steps.tokens) <= CHUNK
    assert sum(steps.tokens) < 600 + 5 * decode.page
    assert not re.search("dEE", steps.kinds), steps.kinds
    assert all(decode.requests[rid].cached_tokens >= 192 for rid in rids)


@pytest.mark.server("--enable-session-radix-cache", env=ADMITTED)
def test_turns_of_sessions_that_sglang_names(decode: Decode, steps: Steps) -> None:
    """Guards against KV that SGLang keeps for a named session, which local turns must not miss or
    release."""
    first = [text(200), text(237, 2)]
    answers = decode.learn(first, 12)
    second = [[*p, *a, *text(40, 3)] for p, a in zip(first, answers, strict=True)]
    expected = decode.learn(second, 12)
    for prompts, wanted in ((first, answers), (second, expected)):
        steps.reset()
        rids = [decode.ask(p, 12, session_id=f"s{i}") for i, p in enumerate(prompts)]
        decode.finish()
        assert [decode.output(rid) for rid in rids] == wanted
    assert 0 < sum(steps.tokens) < 200, "the first turns are in the tree"


@families
def test_later_turns_behind_kv_from_prefill(decode: Decode, steps: Steps) -> None:
    """Guards against windows, an index or a state that fit another prefix than decode's tree holds,
    for a turn of one chunk and for one of several."""
    decode.scheduler.lead_turns.peers = Peers(known=False)
    second, expected = later_turns(decode, [40, 300], 16)
    decode.scheduler.lead_turns.peers = Peers()
    steps.reset()
    rids = [decode.ask(prompt, 16) for prompt in second]
    decode.finish()
    assert [decode.output(rid) for rid in rids] == expected
    assert 0 < sum(steps.tokens) < 350 + 2 * decode.page
    assert all(decode.requests[rid].cached_tokens >= 192 for rid in rids)


@short
def test_each_answer_is_explained(decode: Decode, steps: Steps) -> None:
    """Guards against a local turn that passes for a remote one, and against values that SGLang's
    processes cannot send each other: the tokenizer would end."""
    (local, long), _ = later_turns(decode, [40, 150], 4)
    page = decode.scheduler.tree_cache.page_size
    for prompt, where, reason in ((local, "local", "short"), (long, "remote", "long")):
        rid = decode.ask(prompt, 4)
        decode.finish()
        req = decode.requests[rid]
        details = decode.scheduler.output_streamer.get_cached_tokens_details(req)
        details = msgspec.convert(details, io_struct.CachedTokensDetails)
        assert (details["turn"], details["turn_reason"]) == (where, reason)
        hit, new = details["decode_hit_tokens"], len(prompt) - details["decode_hit_tokens"]
        assert 192 <= hit < len(prompt) and hit % page == 0
        local_tokens = new if where == "local" else 0
        assert details["local_tokens"] == local_tokens
        assert details["requested_tokens"] == new - local_tokens


@loops
@pytest.mark.parametrize("chunked", [False, True])
def test_an_abort_ends_a_local_turn_at_each_stage(
    decode: Decode, steps: Steps, chunked: bool
) -> None:
    """Guards against an abort (queued, launched, between two chunks, computed, running) that does
    not end its turn, ends another one, or leaks memory."""
    (other, mine), (expected, _) = later_turns(decode, [20, 300 if chunked else 30], 10)
    ends = set()
    for stage in range(14):
        decode.flush()
        first = decode.ask(other, 10)
        decode.step(2)
        rid = decode.ask(mine, 30)
        decode.step(stage)
        decode.abort(rid)
        decode.finish()
        assert decode.output(first) == expected
        reason = decode.requests[rid].finished_reason
        assert type(reason).__name__ == "FINISH_ABORT"
        ends.add(len(decode.output(rid)))
    assert 0 in ends and max(ends) > 0


@loops
@pytest.mark.parametrize("chunked", [False, True])
def test_a_pause_that_retracts_takes_local_turns_back_at_each_stage(
    decode: Decode, steps: Steps, chunked: bool
) -> None:
    """Guards against rows or pages that stay in use while the engine is paused, and against a
    retracted request that SGLang holds twice, or that is not queried from prefill after the
    pause."""
    from sglang.srt.managers.io_struct import ContinueGenerationReqInput, PauseGenerationReqInput

    second, _ = later_turns(decode, [20, 300 if chunked else 30], 10)
    empty = decode.balance()
    for stage in range(2, 9):
        rids = [decode.ask(second[0], 30)]
        decode.step(2)
        rids.append(decode.ask(second[1], 30))
        decode.step(stage)
        decode.inbox.append(PauseGenerationReqInput(mode="retract"))
        decode.step()
        held = decode.prealloc.held_rebootstrap_reqs
        assert {req.rid for req in held} == set(rids)
        assert decode.balance() == empty
        assert decode.call(decode.scheduler.is_fully_idle)
        held.clear()  # there is no prefill server to query
        for rid in rids:
            del decode.requests[rid]
        decode.inbox.append(ContinueGenerationReqInput(torch_empty_cache=False))
        decode.step()


@loops
def test_a_pause_in_place_goes_on_where_it_stopped(decode: Decode, steps: Steps) -> None:
    """Guards against a pause with chunks launched, computed or queued that loses or repeats one."""
    from sglang.srt.managers.io_struct import ContinueGenerationReqInput, PauseGenerationReqInput

    second, expected = later_turns(decode, [20, 300], 10)
    for stage in range(1, 7):
        decode.flush()
        rids = [decode.ask(prompt, 10) for prompt in second]
        decode.step(stage)
        decode.inbox.append(PauseGenerationReqInput(mode="in_place"))
        ran = len(steps.kinds)
        decode.step(3)
        assert len(steps.kinds) == ran
        decode.inbox.append(ContinueGenerationReqInput(torch_empty_cache=False))
        decode.finish()
        assert [decode.output(rid) for rid in rids] == expected


@short
def test_a_long_turn_is_left_to_prefill(decode: Decode, steps: Steps) -> None:
    """Guards against a long turn that is computed here, and a short one that is not."""
    first = [text(200), text(250, 2)]
    answers = decode.learn(first, 8)
    second = [[*p, *a, *text(50, 3)] for p, a in zip(first, answers, strict=True)]
    expected = decode.learn(second, 8)
    steps.reset()
    decode.scheduler.lead_turns.telemetry = stats = Telemetry()
    rids = [decode.ask(prompt, 8) for prompt in first]
    decode.finish()
    assert steps.tokens == [] and [decode.output(rid) for rid in rids] == answers
    rids = [decode.ask(prompt, 8) for prompt in second]
    decode.finish()
    assert [decode.output(rid) for rid in rids] == expected
    turns = stats.by("decode_turns")
    assert turns["remote", "long"] == turns["local", "short"] == 2


@short
def test_a_burst_beyond_the_places(decode: Decode, steps: Steps) -> None:
    """Guards against turns that wait here for a place in the running batch while prefill could
    compute them."""
    places = decode.scheduler.lead_turns.places
    prompts = [text(30, seed) for seed in range(places + 2)]
    decode.learn(prompts, 4)
    decode.scheduler.lead_turns.telemetry = stats = Telemetry()
    for prompt in prompts:
        decode.ask(prompt, 4)
    decode.finish()
    # A few of the first do not fit into SGLang's budget, and go to prefill by ``no_memory``.
    assert stats.by("decode_turns")["remote", "no_place"] == 2


@short
def test_beside_a_stock_prefill_server_everything_is_remote(decode: Decode, steps: Steps) -> None:
    """Guards against local turns with stock prefill, which would answer with an error."""
    decode.scheduler.lead_turns.peers = Peers(known=False)
    prompt = text(60)
    (answer,) = decode.learn([prompt], 8)
    steps.reset()
    rid = decode.ask(prompt, 8)
    decode.finish()
    assert decode.output(rid) == answer and not steps.tokens
    assert all(frames[-1] != b"LOCAL" for frames in decode.frames)


@backends
def test_short_turns_are_answered_when_prefill_is_lost(decode: Decode, steps: Steps) -> None:
    """Guards against short turns that fail while they wait for memory or a handshake, or after
    their pages were announced, and against a long turn that fails without the reason."""
    decode.scheduler.lead_turns.peers = Peers(known=False)
    prompts = [text(60), text(300, 2)]
    answers = decode.learn(prompts, 8)
    rids = [decode.ask(prompt, 8) for prompt in prompts]
    decode.step(2)
    assert decode.arriving() == rids
    decode.lose_prefill()
    decode.step(4)
    assert decode.ended(rids[1])
    assert "FALLBACK_PREFILL_TOKENS" in decode.requests[rids[1]].finished_reason.message
    for rid in rids:
        decode.confirm(rid)
    decode.until(lambda: decode.ended(*rids))
    assert decode.output(rids[0]) == answers[0]


@backends
def test_a_request_whose_client_left_is_not_saved(decode: Decode, steps: Steps) -> None:
    """Guards against an aborted request that is taken for lost: an abort also fails the room."""
    decode.scheduler.lead_turns.peers = Peers(known=False)
    prompt = text(60)
    decode.learn([prompt], 8)
    steps.reset()
    rid = decode.ask(prompt, 8)
    decode.step(2)
    decode.abort(rid)
    decode.step(2)
    decode.confirm(rid)
    decode.until(decode.is_idle)
    assert decode.output(rid) == [] and not steps.tokens


@short
def test_a_lost_turn_waits_for_no_rank_of_prefill(
    decode: Decode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a turn that waits for a prefill server of two data-parallel ranks: the server
    was queried for the room's rank and lost before it answered. It may come back during the
    turn."""
    ranks: dict[str, int] = {}
    monkeypatch.setattr(
        CommonKVReceiver, "query_prefill_dp_ranks", staticmethod(lambda address, rooms: ranks)
    )

    def bring() -> None:
        decode.bring_prefill()
        (info,) = decode.manager.prefill_info_table.values()
        info.dp_size, info.follow_bootstrap_room = 2, False

    prompt = text(60)
    (answer,) = decode.learn([prompt], 12)
    bring()
    rid = decode.ask(prompt, 12)
    decode.step(3)
    assert decode.prealloc.pending_reqs
    decode.lose_prefill()
    decode.step(3)
    assert not decode.prealloc.pending_reqs
    bring()
    ranks[str(decode.requests[rid].bootstrap_room)] = 0
    decode.until(lambda: decode.ended(rid))
    assert decode.output(rid) == answer
