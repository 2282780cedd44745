"""The router between clients and stub workers: protocol, failures, and the release of charges."""

import asyncio
import json
from pathlib import Path

import pytest

from benchmark.agentic.router.workers import DECODE, PREFILL
from component.agentic.router_rig import Rig, Worker, run, until

#: Time limit of a request.
LIMIT_S = 10.0
#: A time after it: aiohttp rounds the end of limits above 5 s up to a whole second.
TOO_LONG_S = 11.0


def pair() -> tuple[Worker, Worker]:
    return Worker("prefill"), Worker("decode")


def test_both_halves_get_one_body_and_decode_answers() -> None:
    """Guards SGLang's PD protocol: one room, prefill's bootstrap address, one rid."""
    prefill, decode = pair()

    async def test(rig: Rig) -> None:
        answer = await rig.ask([1, 2, 3], extra_key="k")
        assert answer.whole and len(answer.events) == decode.tokens + 1
        assert prefill.bodies == decode.bodies
        (body,) = prefill.bodies
        assert (body["bootstrap_host"], body["bootstrap_port"]) == ("127.0.0.1", 8000)
        assert 0 <= body["bootstrap_room"] < 2**63 and body["rid"]
        assert (body["input_ids"], body["extra_key"]) == ([1, 2, 3], "k")
        assert answer.headers["X-Prefill-Worker"] == prefill.url
        assert answer.headers["X-Decode-Worker"] == decode.url
        await until(lambda: not any(rig.load().values()))
        rig.assert_idle()
        assert rig.counts(prefill) == {"ok": 1}
        async with rig.session.get(rig.url + "/workers") as got:
            assert [worker["url"] for worker in await got.json()] == [prefill.url, decode.url]

    run(test, [prefill, decode])


@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_worker_costs_its_requests_one_error_each(killed: int) -> None:
    """Guards against errors of other workers' requests, against charges that stay, and against a
    retry of work that a worker had begun: ``killed`` tokens had reached the client."""
    first, second = Worker(), Worker()

    async def test(rig: Rig) -> None:
        gates = [worker.hold(killed) for worker in (first, second)]
        requests = [rig.ask() for _ in range(6)]
        await until(lambda: len(first.bodies) == len(second.bodies) == 3)
        if killed:
            state = rig.router.scheduler.workers
            await until(lambda: all(w.pending_tokens == 0 for w in state))
        await first.kill()
        gates[1].set()
        answers = await asyncio.gather(*requests)
        broken = [answer for answer in answers if answer.errors]
        assert len(broken) == 3 and sum(answer.whole for answer in answers) == 3
        for answer in broken:
            assert answer.status == (200 if killed else 502)
            (message,) = answer.errors
            assert first.url in message
            if killed:
                assert answer.events[-1] == "[DONE]" and len(answer.events) == killed + 2
        assert len(second.bodies) == 3
        rig.assert_idle()
        # Later requests go to the worker that is left.
        assert all([(await rig.ask()).whole for _ in range(4)])

    run(test, [first, second])


@pytest.mark.parametrize("dead", ["prefill", "decode", "colocated"])
def test_a_worker_that_refuses_connections_is_skipped(dead: str) -> None:
    """Guards against a missing retry, and against requests with halves on the wrong workers."""
    workers = [Worker("colocated"), Worker("colocated")]
    if dead != "colocated":
        workers = [Worker("prefill"), Worker("prefill"), Worker("decode"), Worker("decode")]

    async def test(rig: Rig) -> None:
        first = next(worker for worker in workers if worker.role == dead)
        await first.kill()
        answers = [await rig.ask() for _ in range(4)]
        assert all(answer.whole for answer in answers)
        for role in {worker.role for worker in workers}:
            bodies = [body for worker in workers if worker.role == role for body in worker.bodies]
            assert len({body["rid"] for body in bodies}) == len(bodies) == 4
        assert rig.counts(first)["unreached"] >= 1
        assert all(worker.aborted == [] for worker in workers)
        await until(lambda: not any(rig.load().values()))
        rig.assert_idle()

    run(test, workers, max_attempts=4)


@pytest.mark.parametrize("how", ["killed", "error"])
def test_a_failed_prefill_ends_decode_too(how: str) -> None:
    """Guards against a decode half that keeps its memory and waits for KV that never comes."""
    prefill, decode = pair()

    async def test(rig: Rig) -> None:
        decode.hold(0)
        if how == "error":
            prefill.status = 500
        else:
            prefill.hold(0)
        request = rig.ask()
        await until(lambda: prefill.bodies and decode.bodies)
        if how == "killed":
            await prefill.kill()
        answer = await request
        assert answer.status == (502 if how == "killed" else 500)
        assert prefill.url in answer.errors[0]
        await until(lambda: decode.aborted == [decode.bodies[0]["rid"]])
        rig.assert_idle()

    run(test, [prefill, decode])


def test_a_prefill_that_dies_after_its_work_costs_nothing() -> None:
    """Guards against a lost answer that decode can finish alone."""
    prefill, decode = pair()

    async def test(rig: Rig) -> None:
        prefill.hold(0)
        gate = decode.hold(1)
        request = rig.ask()
        await until(lambda: decode.bodies and prefill.bodies)
        await until(lambda: rig.router.scheduler.pools[DECODE][0].pending_tokens == 0)
        await prefill.kill()
        gate.set()
        assert (await request).whole
        rig.assert_idle()
        assert decode.aborted == []

    run(test, [prefill, decode])


def test_decodes_own_error_reaches_the_client() -> None:
    """Guards against a refusal without its text, or that counts as a failure of the server."""
    prefill, decode = pair()

    async def test(rig: Rig) -> None:
        prefill.hold(0)
        decode.status = 400
        answer = await rig.post({"input_ids": [1]})
        assert (answer.status, answer.text) == (400, "stub fails")
        await until(lambda: prefill.aborted)
        rig.assert_idle()
        assert rig.counts(decode)["error"] == 1

    run(test, [prefill, decode])


@pytest.mark.parametrize("token", [0, 1])
@pytest.mark.parametrize("workers", ["pair", "colocated"])
def test_a_client_that_leaves_ends_its_request_everywhere(workers: str, token: int) -> None:
    """Guards against work and charges that outlive a client, before or after the first token."""
    stubs = list(pair()) if workers == "pair" else [Worker()]

    async def test(rig: Rig) -> None:
        for stub in stubs:
            stub.hold(0 if stub.role == "prefill" else token)
        request = rig.ask()
        await until(lambda: all(stub.bodies for stub in stubs))
        if token:
            answering = rig.router.scheduler.workers[-1]
            await until(lambda: answering.pending_tokens == 0)
        assert set(rig.load().values()) == {1}
        request.cancel()
        await until(lambda: all(stub.aborted for stub in stubs))
        rig.assert_idle()
        for stub in stubs:
            assert rig.counts(stub)["abandoned"] == 1
        assert [len(stub.aborted) for stub in stubs] == [1] * len(stubs)

    run(test, stubs)


def test_a_request_that_takes_too_long_ends() -> None:
    """Guards against a hung worker that holds a client and a charge for ever."""
    worker = Worker()

    async def test(rig: Rig) -> None:
        worker.hold(0)
        request = rig.ask()
        await until(lambda: worker.bodies)
        rig.advance(TOO_LONG_S)
        answer = await request
        assert answer.status == 504 and worker.url in answer.errors[0]
        await until(lambda: worker.aborted)
        rig.assert_idle()

    run(test, [worker], request_timeout=LIMIT_S)


def test_prefill_may_take_longer_than_decode_but_not_for_ever() -> None:
    """Guards against a charge that stays because prefill's half outlives its request, and against
    other requests that its time limit ends."""
    prefill, decode = pair()

    async def test(rig: Rig) -> None:
        prefill.hold(0)
        assert (await rig.ask()).whole
        assert rig.load() == {prefill.url: 1, decode.url: 0}
        rig.advance(TOO_LONG_S)
        await until(lambda: not any(rig.load().values()))
        assert rig.counts(prefill)["lost"] == 1
        await until(lambda: prefill.aborted)
        rig.assert_idle()

    run(test, [prefill, decode], request_timeout=LIMIT_S)


def test_health_takes_a_worker_out_and_brings_it_back() -> None:
    """Guards against health checks that miss a bad status or a closed port, and against a returned
    worker with its old pool size or cache."""
    first, second = Worker(), Worker()

    async def test(rig: Rig) -> None:
        state, first.pool_tokens = rig.router.scheduler.workers[0], 8192
        for status, up in ((503, True), (503, False), (200, True)):
            first.status = status
            await rig.router.check(state)
            assert state.up is up
        assert state.pool_tokens == 8192
        state.index.learn([1])
        await first.kill()
        await rig.router.check(state)
        assert state.up and len(state.index) == 0, "a restarted process has an empty cache"

    run(test, [first, second], health_fall=2)


def test_the_next_turn_goes_where_the_conversation_is() -> None:
    """Guards against a next turn without cache affinity: both workers learn the prompt and the
    answer before the next decision."""
    workers = [Worker("prefill"), Worker("decode", tokens=8), Worker("decode", tokens=8)]

    async def test(rig: Rig) -> None:
        prompt = list(range(100, 140))
        answer = await rig.ask(prompt)
        await until(lambda: not any(rig.load().values()))
        turn = [*prompt, *answer.events[-2]["output_ids"], 7, 8]
        again = await rig.ask(turn)
        assert again.headers["X-Decode-Worker"] == answer.headers["X-Decode-Worker"]
        held = {w.url: len(w.index) for w in rig.router.scheduler.workers}
        assert sorted(held.values()) == [0, len(turn) // 4, len(turn) // 4]

    run(test, workers, decode_policy="delta_kv")


def test_every_decision_is_logged_with_its_terms(tmp_path: Path) -> None:
    """Guards the log: the choice, all candidates, and terms that add up to the score."""
    workers = [Worker("prefill"), Worker("decode"), Worker("decode")]
    log = tmp_path / "decisions.jsonl"

    async def test(rig: Rig) -> None:
        await rig.post({"input_ids": [1] * 8}, headers={"X-Session-Id": "s"})
        (line,) = [json.loads(text) for text in log.read_text().splitlines()]
        assert (line["session"], line["tokens"], line["attempt"]) == ("s", 8, 0)
        assert line["rid"] == workers[0].bodies[0]["rid"]
        assert line["taken"] == ["prefill", "decode"]
        decode = line["pools"]["decode"]
        assert decode["policy"] == "delta_kv" and decode["reason"] == "score"
        assert [c["name"] for c in decode["candidates"]] == [w.url for w in workers[1:]]
        for candidate in decode["candidates"]:
            assert candidate["score"] == pytest.approx(sum(candidate["terms"].values()))
        assert decode["chosen"] in {w.url for w in workers[1:]}

    run(test, workers, log, decode_policy="delta_kv")


def test_a_flush_clears_the_routers_indexes_and_readiness_needs_a_pair() -> None:
    """Guards against warm indexes after a benchmark's flush, and readiness without a pair."""
    prefill, decode = pair()

    async def test(rig: Rig) -> None:
        await rig.ask([1] * 40)
        await until(lambda: not any(rig.load().values()))
        assert len(rig.router.scheduler.pools[PREFILL][0].index) == 10
        rig.router.scheduler.pins[PREFILL].note("s", prefill.url)
        async with rig.session.post(rig.url + "/flush_cache") as got:
            assert got.status == 200
        assert [len(w.index) for w in rig.router.scheduler.workers] == [0, 0]
        assert len(rig.router.scheduler.pins[PREFILL]) == 0
        rig.router.scheduler.pools[DECODE][0].up = False
        async with rig.session.get(rig.url + "/health") as got:
            assert got.status == 503  # a pair without one half serves no request

    run(test, [prefill, decode])
