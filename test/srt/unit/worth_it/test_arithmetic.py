"""Closed forms against numbers worked out by hand, and against the published reports."""

from __future__ import annotations

import math

import pytest

from benchmark.kv_transfer import shapes
from benchmark.kv_transfer.shapes import Shape
from benchmark.worth_it import arithmetic
from benchmark.worth_it.arithmetic import Rates, Split, Workload
from benchmark.worth_it.estimate import Estimate
from benchmark.worth_it.words import GIB, answers, notes, terms

PR = {"prefix": 50_000, "suffix": 4500, "prefixes": 20}
ONE_KB = Shape("one KB a token", layers=4, kv_heads=1, head_dim=64)
"""2 x 4 layers x 1 head x 64 x 2 bytes."""
WORK = arithmetic.of_sizes(prefix=1000, new=100, answer=50, turns=5, prefixes=2, sessions=40)


def test_requests_that_pools_hold() -> None:
    """11.5 GiB in a pool of 38 GiB: three requests, the limit that the report met. The pull
    request's pool holds 37 whole requests, and more than all 128 with shared prefixes. A pool too
    small for all prefixes gains nothing from sharing, where the formula would give a negative
    number."""
    holds, gib = arithmetic.holds, GIB / 98_304
    p99 = {"prefix": 0, "suffix": int(11.5 * gib), "prefixes": 1}
    assert holds(38 * gib, **p99, shared=False) == holds(38 * gib, **p99, shared=True) == 3
    pool = 37 * (54_500 + 355.4 / 2) / 0.99
    assert holds(pool, **PR, shared=False) == 37
    shared = holds(pool, **PR, shared=True, reserved=400)
    assert shared == (int(pool) - 20 * 50_000) // 4900 > 128
    assert holds(400_000, **PR, shared=True) == holds(400_000, **PR, shared=False) == 7


def test_a_mean_turn_is_the_mean_of_all_turns() -> None:
    """Turn k has the prefix, k - 1 earlier turns with answers, and its own tokens."""
    prompts = [1000 + (k - 1) * 150 + 100 for k in range(1, 6)]
    assert WORK.prompt == sum(prompts) / 5 == 1400
    assert (WORK.history, WORK.new, WORK.again) == (300, 100, 40)
    single = arithmetic.of_sizes(1000, 100, 50, 1, 2, 40)
    assert (single.history, single.again) == (0, 0), "no earlier answer"


def test_a_mean_turn_of_a_trace_adds_up() -> None:
    """Guards shares of tokens taken for shares of requests."""
    from benchmark.harness.report import Spread

    lengths = {
        "input_tokens": Spread(4, 1000.0, 0, 0, 0),
        "output_tokens": Spread(4, 60.0, 0, 0, 0),
    }
    work = arithmetic.of_trace({**lengths, "hit_across": 0.25, "hit_within": 0.5}, 3, 9)
    assert (work.shared, work.history, work.new, work.answer) == (250, 500, 250, 60)
    assert (work.again, work.prefixes, work.sessions) == (0, 3, 9)


def test_whole_pages_hit_and_move() -> None:
    assert arithmetic.hit_tokens(WORK, 1.0, page=64) == 1280, "20 pages of 1300 tokens"
    assert arithmetic.hit_tokens(WORK, 0.5, page=64) == 1088, "17 pages of 1150 tokens"
    assert arithmetic.hit_tokens(WORK, 1.0, page=64, hit_rate=0.5) == 640, "measured: of 1400"
    assert arithmetic.moved_tokens(1400, 1280, page=64) == 22 * 64 - 1280 == 128


def test_times_of_one_turn() -> None:
    """1000 tokens at 10,000/s and 50 MB at 1 GB/s; or four chunks of 250 with 3 steps between."""
    assert arithmetic.remote_s(1000, 50e6, 10_000, 1e9) == pytest.approx(0.150)
    assert arithmetic.local_s(1000, 10_000, 0.02, 250) == pytest.approx(0.160)
    assert arithmetic.local_s(200, 10_000, 0.02, 250) == pytest.approx(0.020), "one chunk: no step"
    assert arithmetic.chunk_tokens(512, 10_000, None, 0.02) == 512
    assert arithmetic.chunk_tokens(512, 10_000, 0.05, 0.02) == pytest.approx(300)
    assert arithmetic.chunk_tokens(512, 10_000, 0.01, 0.02) == 0


@pytest.mark.parametrize("step_s", [0.0, 0.025])
@pytest.mark.parametrize("local", [3_000.0, 9_000.0, 12_000.0])
@pytest.mark.parametrize("lost", [0.0, 30.0])
def test_local_turns_win_up_to_where_both_times_are_equal(
    step_s: float, local: float, lost: float
) -> None:
    """Guards the solved form against the two times that it compares."""
    rates = Rates(prefill=12_000, local=local, wire=50e9, step_s=step_s)
    chunk, token_bytes = 256.0, 262_144
    longest = arithmetic.longest_local(WORK, lost, rates, token_bytes, chunk)

    def lead(missing: float) -> float:
        computed = missing - lost + WORK.again
        remote = arithmetic.remote_s(computed, missing * token_bytes, rates.prefill, rates.wire)
        return remote - arithmetic.local_s(missing, local, step_s, chunk)

    if math.isinf(longest):
        assert lead(1e6) > 0
    else:
        assert lead(longest) == pytest.approx(0, abs=1e-9)
        assert lead(longest * 1.01) < 0 < lead(longest * 0.99)


def test_local_turns_by_hand() -> None:
    """The last answer, 40 tokens, takes prefill 4 ms more; a token takes decode 0.1 ms more than
    prefill, and none on the wire: 40 tokens. Equal speeds without steps: each length. No chunk fits
    the ITL bound: none."""
    slower = Rates(prefill=10_000, local=5_000, wire=1e18)
    assert arithmetic.longest_local(WORK, 0, slower, 1, 512) == pytest.approx(40)
    equal = Rates(prefill=10_000, local=10_000, wire=1e9)
    assert arithmetic.longest_local(WORK, 0, equal, 1000, 512) == math.inf
    assert arithmetic.longest_local(WORK, 0, equal, 1000, 0) == 0
    assert arithmetic.longest_local(WORK, 9999, slower, 1, 512) == 0, "decode lost the history"


def test_turns_of_split_and_aggregated_servers() -> None:
    """Two prefill servers of 0.1 s a turn and one decode server of 0.1 s: ten turns/s, with half of
    prefill idle. Three aggregated servers of 0.08 + 0.1 s: 16.7; with a third of the batch and
    equally long steps 0.08 + 0.3 s: 7.9."""
    split = Split(2, 1, prefill_s=0.08, remote_s=0.1, decode_s=0.1)
    assert split.disaggregated == pytest.approx(10)
    assert split.aggregated == pytest.approx((3 / 0.38, 3 / 0.18))
    assert split.ratios == pytest.approx((10 * 0.18 / 3, 10 * 0.38 / 3))


def estimate(**changes: object) -> Estimate:
    """Return an estimate with a pool of 20,000 tokens, pages of one, and all speeds."""
    rates = Rates(prefill=10_000, local=10_000, wire=1e9, step_s=0.02)
    return Estimate(ONE_KB, WORK, 20_000, **{"rates": rates, **changes})


def test_terms_by_hand() -> None:
    """20,000 tokens hold 13 requests of 1,450; with two prefixes of 1,000 held once, 40 of 450. A
    turn moves 1,433,600 bytes, or 102,400."""
    values = {term.name: term.value for term in terms(estimate())}
    assert values["KV of a token"] == "1,024 B"
    assert values["requests that fit, stock"] == "13"
    assert values["requests that fit, radix cache"] == "40" and estimate().kept == 1
    assert values["KV moved a turn, stock"] == "1.4 MB"
    assert values["KV moved a turn, radix cache"] == "0.1 MB"
    assert estimate().moved == (1400, 100) and values["saved a turn"] == "1.3 MB"
    assert values["wire time saved a turn"] == "1.3 ms"
    assert values["longest gap, aggregated"] == "30.0 ms"
    assert estimate(ranks=2).token_bytes == 2048, "one head is copied to both ranks"
    latent = Shape("latents", layers=4, kv_heads=1, head_dim=128, mla=True, index_bytes=16)
    assert latent.token_bytes == 1088 == latent.on_rank(4).token_bytes
    copied = Estimate(latent, WORK, 20_000, ranks=4)
    assert copied.token_bytes == 4 * 1088, "each rank receives the latents and the index"


def test_histories_that_do_not_fit_are_not_hit() -> None:
    """80 sessions on a server that holds 40: half of the histories."""
    work = arithmetic.of_sizes(1000, 100, 50, 5, 2, sessions=80)
    few = Estimate(ONE_KB, work, 20_000)
    assert (few.kept, few.hit) == (0.5, 1150)
    assert Estimate(ONE_KB, work, 20_000, decode_servers=2).hit == 1300
    assert "Only 50% of the histories fit" in answers(few)[0]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"itl_s": 0.04}, "PD does not pay: aggregated servers keep 40.0 ms"),
        ({"itl_s": 0.025}, "PD can pay: it keeps 25.0 ms"),
        ({"itl_s": 0.01}, "PD does not help: a decode step alone is longer than 10.0 ms"),
        ({}, "no gap of 30.0 ms between two tokens"),
        ({"rates": Rates(10_000, 10_000, 1e9)}, "not computed without --decode-step-ms"),
        ({"rates": None}, "not computed without --network-gb-s and --prefill-tokens-per-s"),
        ({"itl_s": 0.01}, "Local turns do not pay: the ITL bound is shorter than a decode step"),
        ({"itl_s": 0.04}, "a mean turn wins (100)"),
        ({"rates": Rates(10_000, 1_000, 1e9)}, "for a mean turn prefill wins (100)"),
        ({"hit_rate": 0.0}, "The decode radix cache does not pay"),
    ],
)
def test_answers(changes: dict[str, object], said: str) -> None:
    """Guards the sentences: each regime has its own, and a missing flag is named."""
    assert said in " ".join(answers(estimate(**changes)))


def test_a_prefix_that_no_other_session_has_gains_no_room() -> None:
    alone = Workload(shared=0, history=300, new=100, answer=50, sessions=4)
    text = answers(Estimate(ONE_KB, alone, 20_000))[0]
    assert "75% less KV, and as many requests fit: 44" in text


@pytest.mark.parametrize(
    ("shape", "said"),
    [
        (ONE_KB, None),
        (shapes.load("deepseek-v3.2"), None),
        (shapes.load("deepseek-v3.2", "fp8_e4m3"), "656 B a layer instead of 576"),
        (shapes.load("gpt-oss-20b"), "12 of 24 layers see 128 tokens"),
        (Shape("hybrid", 12, 4, 128, state_layers=36), "36 layers keep a recurrent state"),
    ],
)
def test_a_model_that_the_form_does_not_describe_is_named(shape: Shape, said: str | None) -> None:
    texts = notes(Estimate(shape, WORK, 20_000))
    assert len(texts) == (said is not None) and (said or "") in "".join(texts)
