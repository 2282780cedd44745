"""Numbers and sentences of a page: which differences it reports."""

from __future__ import annotations

import json
import math
import random
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from benchmark.agentic.fleet import spec
from benchmark.agentic.fleet.spec import Arm
from benchmark.agentic.load.outcome import Outcome
from benchmark.agentic.load.run import Window
from benchmark.agentic.load.sessions import COLD, Made
from benchmark.agentic.report.events import events
from benchmark.agentic.report.numbers import STAGES, Interval, interval, numbers, ratio
from benchmark.agentic.report.page import page
from benchmark.agentic.report.plots import draw
from benchmark.agentic.report.summary import summary
from benchmark.agentic.report.verdict import answer, better, warnings
from benchmark.agentic.studies import cli, record
from benchmark.agentic.studies.record import Cell, Run
from benchmark.agentic.studies.spec import Claim, LoadSpec, Study

REQUESTS = 40


def outcome(index: int, e2e_s: float, *, failed: bool = False, **more: Any) -> Outcome:
    fields: dict[str, Any] = {
        "index": index,
        "session_id": f"s{index // 2}",
        "prompt_tokens": 100,
        "wanted_tokens": 5,
        "trace_new_tokens": 100,
        "cached_tokens": 50,
        "output_tokens": 5,
        "request_class": ("WARM", "HEAVY")[index % 2],
        "scheduled_s": float(index),
        "started_s": float(index),
        "finished_s": index + e2e_s,
        "late_s": 0.0,
        "ttft_s": None if failed else e2e_s / 2,
        "tpot_s": None if failed else 0.01,
        "e2e_s": e2e_s,
        "error": "abort" if failed else None,
    }
    return Outcome(**{**fields, **more})


def cells(arm: str, scale: float, rounds: int = 3, load: float = 4, **more: Any) -> list[Cell]:
    """Requests of very different lengths, the same in all arms, with some noise per round."""
    result = []
    for number in range(rounds):
        noise = random.Random(f"{arm} {number}")
        times = [(1 + i % 7) * scale * noise.uniform(0.9, 1.1) for i in range(REQUESTS)]
        outcomes = [outcome(i, seconds, **more) for i, seconds in enumerate(times)]
        result.append(Cell(arm, number, load, outcomes=outcomes))
    return result


def run(*groups: list[Cell], rounds: int = 3) -> Run:
    names = list(dict.fromkeys(cell.arm for group in groups for cell in group))
    study = Study(
        title="A title",
        question="Which?",
        arms={name: Arm(title=name, aggregated=1) for name in names},
        load=LoadSpec(sessions=(4,)),
        rounds=rounds,
        slo=spec.Slo(ttft_s=2.0, tpot_s=0.05),
    )
    sizes = ("requests", "prompt_tokens", "output_tokens", "largest_tokens")
    trace: dict[str, Any] = {**dict.fromkeys(sizes, REQUESTS), "left_out": 0}
    trace |= {"source": "a trace", "ratio": 1.0, "classes": "WARM < HEAVY"}
    lengths = {"mean": 1, "p50": 1, "p90": 1, "p99": 1}
    described = {"requests": 1, "sessions": 1, "multi_turn_sessions": 0.5, "hit": 0.5}
    trace["described"] = {**described, "input_tokens": lengths, "output_tokens": lengths}
    fleet = spec.load(spec.RIG, spec.FleetFile).public()
    environment = {"date": "2026-01-01", "machine": "a machine", "sglang": "1", "commit": "c0"}
    servers = {name: {"aggregated": 1, "prefill": 0, "decode": 0} for name in names}
    titles = {name: name for name in names}
    all_cells = [cell for group in groups for cell in group]
    fields = (study, titles, [], fleet, environment, "the command", trace, all_cells, servers)
    return Run(*fields)


def change(result: Run, arm: str, changed_fields: Any) -> None:
    """Replace fields of every outcome of an arm with `changed_fields(outcome)`."""
    for cell in (cell for cell in result.cells if cell.arm == arm):
        cell.outcomes = [msgspec.structs.replace(o, **changed_fields(o)) for o in cell.outcomes]


def verdict(result: Run) -> str:
    return answer(result, numbers(result))


def shown(result: Run) -> str:
    return page(msgspec.to_builtins(summary(result), enc_hook=lambda n: n.item()), {"Fig": "f.svg"})


def test_a_difference_is_one_beyond_its_interval() -> None:
    """Guards against a page that names a winner out of noise, or misses a real one: request times
    vary sevenfold, which comparing pairs of rounds removes."""
    text = verdict(run(cells("a", 1.0), cells("b", 0.8), cells("c", 0.81)))
    assert "**no arm is best**" in text and "*b* has 0.80 [" in text
    assert "end-to-end time of *a*" in text and "of *c*" not in text
    assert "**b is best**: *b* has 0.80 [" in verdict(run(cells("a", 1.0), cells("b", 0.8)))
    assert "**b is best**" in verdict(run(cells("a", 1.0), cells("b", 0.9)))
    assert "**no verdict**" in verdict(run(cells("a", 1.0), cells("b", 1.0)))
    few = run(cells("a", 1.0, rounds=2), cells("b", 0.1, rounds=2), rounds=2)
    assert verdict(few).startswith("**No verdict: 2 rounds") and "**0." not in shown(few)


def test_an_arm_that_wins_by_one_quantity_is_not_best() -> None:
    """Guards against a headline that calls an arm best although its answers begin five times as
    late."""
    result = run(cells("a", 1.0), cells("b", 1.0))
    change(result, "b", lambda o: {"tpot_s": 0.005, "ttft_s": o.ttft_s * 5})
    text = verdict(result)
    assert "**a trade**: *a* has 0.2" in text and "is best" not in text
    assert re.search(
        r"the TTFT.* of \*b\*; \*b\* has 0\.50 \[.*\] times the TPOT of \*a\*\.$", text
    )


def test_a_grid_says_at_how_many_loads(tmp_path: Path) -> None:
    """Guards the first sentence of a grid: more goodput is better, less time is better."""
    sides = {1: Interval(0.5, 0.4, 0.6), -1: Interval(2, 1.5, 3), 0: Interval(0.9, 0.8, 1.1)}
    assert all(better("itl_p99", interval_) == side for side, interval_ in sides.items())
    assert all(better("goodput", interval_) == -side for side, interval_ in sides.items())
    scales = {("a", 4): 1.0, ("b", 4): 0.5, ("c", 4): 1.0} | {(arm, 8): 1.0 for arm in "abc"}
    result = run(*(cells(arm, scale, load=load) for (arm, load), scale in scales.items()))
    result.study = msgspec.structs.replace(
        result.study, made=Made(), grid={"turns": (2,)}, load=LoadSpec((4, 8), window=Window())
    )
    expected = "Of 2 loads, against a: **b** is better in TTFT at 1, worse at 0; in ITL"
    assert verdict(result).startswith(expected)
    for cell in result.cells:
        cell.over = (("turns", 2.0), ("cold_share", 0.1 * cell.load))
    described = msgspec.to_builtins(summary(result), enc_hook=lambda n: n.item())
    assert list(draw(described, tmp_path).values()) == ["grid.svg"]
    assert "cold share 0.4" in (tmp_path / "grid.svg").read_text()
    # The intervals hold together: five quantities of two arms over the first arm.
    times = [arms["b"]["of_first_arm"]["e2e_mean"] for arms in described["loads"].values()]
    assert times == [
        numbers(result).ratio(load, ("b", "a"), "e2e_mean", sure=0.995)
        for load in described["loads"]
    ]


def test_equal_arms_get_a_verdict_on_one_page_of_twenty() -> None:
    """Guards against a winner out of noise that all requests of a round share, such as a machine
    busy with other work: three rounds say little about their spread, and several loads and
    quantities are several chances."""
    verdicts = 0
    for number in range(100):
        rng = random.Random(number)
        arms = []
        for name, load, row in ((a, b, c) for a in "ab" for b in (4, 8) for c in range(3)):
            busy = rng.lognormvariate(0, 0.1)
            times = [(1 + i % 7) * busy * rng.uniform(0.9, 1.1) for i in range(REQUESTS)]
            arms.append([Cell(name, row, load, outcomes=[*map(outcome, range(REQUESTS), times)])])
        verdicts += verdict(run(*arms)).count("**no verdict**") < 2
    assert verdicts <= 5


@pytest.mark.parametrize(("sure", "max_missed"), [(0.95, 65), (0.99, 18)])
def test_intervals_contain_the_true_value(sure: float, max_missed: int) -> None:
    """Guards the one formula under all verdicts: of 1000 means and ratios of few rounds, no more
    miss the true value than allowed."""
    rng, missed = random.Random(7), [0, 0]
    for _ in range(1000):
        mean = interval((rng.gauss(5, 1) for _ in range(4)), sure)
        ratio_ = ratio((2 * rng.lognormvariate(0, 0.3) for _ in range(4)), sure)
        missed[0] += not mean.low <= 5 <= mean.high
        missed[1] += not ratio_.low <= 2 <= ratio_.high
    assert max(missed) <= max_missed and min(missed) > 0
    assert interval([3.0]) == pytest.approx((3, math.nan, math.nan), nan_ok=True)
    assert ratio([2.0, 2.0, 2.0]) == pytest.approx((2, 2, 2))
    assert math.isnan(ratio([2.0, 2.0]).low), "two rounds are too few"
    assert all(math.isnan(ratio([2.0, 2.0, 2.0, none]).value) for none in (0.0, math.inf))


def test_ratios_use_requests_that_both_arms_counted() -> None:
    """Guards against a slow arm with other requests in its window, and against counting only the
    better rounds if a window never opened in one round."""
    result = run(cells("a", 1.0), cells("b", 0.5))
    for cell in result.cells[3:]:
        cell.outcomes = [o for o in cell.outcomes if o.e2e_s > 1]  # the longer ones
    made_numbers = numbers(result)
    assert made_numbers.ratio("4", ("b", "a"), "e2e_mean").value == pytest.approx(0.5, abs=0.05)
    assert made_numbers.ratio("4", ("b", "a"), "e2e_mean", "HEAVY").value == pytest.approx(
        0.5, abs=0.05
    )
    result.cells[0].outcomes = [
        msgspec.structs.replace(o, counted=False) for o in cells("a", 1)[0].outcomes
    ]
    assert math.isnan(numbers(result).ratio("4", ("b", "a"), "e2e_mean").value)
    del result.cells[0]
    assert math.isnan(numbers(result).ratio("4", ("b", "a"), "e2e_mean").low), "two rounds are left"


def test_failed_requests_count_as_the_time_limit() -> None:
    """Guards against an arm that is fast because its slow requests failed, and against a verdict by
    TPOT, which failed requests lack."""
    result = run(cells("a", 1.0), cells("dead", 0.5, failed=True))
    change(result, "dead", lambda o: {"e2e_s": 0.01, "finished_s": o.started_s + 0.01})
    row = numbers(result).cells.loc["4", "dead"].mean()
    assert row["e2e_mean"] == row["ttft_p50"] == 60.0 and math.isnan(row["tpot_mean"])
    assert row["goodput"] == row["slo"] == 0 and row["failed"] == REQUESTS
    assert "**a is best**" in verdict(result) and "nan" not in verdict(result)
    assert "| 4 | dead | 120 | 0%" in shown(result)
    result.cells = result.cells[:3]
    assert verdict(result).startswith("At 4 sessions at once, a has a mean end-to-end")


def test_an_unreported_miss_is_a_miss() -> None:
    """Guards the hit rate on OpenAI's endpoints: SGLang omits the cached tokens if there are none,
    so that only hits would count."""
    result = run(cells("a", 1.0))
    change(result, "a", lambda o: {"cached_tokens": None if o.index % 4 else 100})
    assert set(numbers(result).cells["hit_rate"]) == {0.25}
    change(result, "a", lambda o: {"cached_tokens": None})
    assert numbers(result).cells["hit_rate"].isna().all()
    assert numbers(result).cells["computed"].isna().all()


def test_computed_tokens_are_compared_with_the_loads_new_tokens() -> None:
    """Guards the figure that says if each token is computed once: sessions are sent in another
    order than in the trace, so the trace's own new tokens would be too few or too many."""
    claim = Claim("computed", "a", "computed", at_most=1.05)
    result = run(cells("a", 1.0), cells("b", 1.0), cells("a", 1.0, load=8))
    change(result, "a", lambda o: {"cached_tokens": 60})
    assert set(numbers(result).cells.loc["4", "a"]["computed"]) == {0.4}  # of the trace's 100
    change(result, "a", lambda o: {"load_new_tokens": 40 if o.index % 2 else 38})
    result.study = msgspec.structs.replace(result.study, claims=(claim,))
    text = shown(result)
    assert "| computed | 4 | at most 1.05 | 1.03 [1.03, 1.03] | agrees |" in text
    assert "| computed | 8 | at most 1.05 | 1.03 [1.03, 1.03] | agrees |" in text
    change(result, "a", lambda o: {"load_new_tokens": 30})
    assert "| computed | 8 | at most 1.05 | 1.33 [1.33, 1.33] | does not agree |" in shown(result)
    few = run(cells("a", 1.0, rounds=2), rounds=2)
    few.study = msgspec.structs.replace(few.study, claims=(claim,))
    assert "| computed | 4 | at most 1.05 | 0.50 | no verdict |" in shown(few)


def test_a_steady_load_counts_only_its_window() -> None:
    """Guards rates and times of a window against requests that began before it or ended after it,
    and the concurrency against counting two requests of which one began as the other ended."""
    result = run(cells("a", 1.0, rounds=1), rounds=1)
    change(result, "a", lambda o: {"finished_s": o.started_s + 1, "counted": 10 <= o.index < 20})
    result.cells[0].window = (10.0, 20.0)
    (row,) = numbers(result).cells.to_dict("records")
    shown = ("requests", "requests_per_s", "at_once", "at_most")
    assert [row[name] for name in shown] == [10, 1, 1, 1]
    result.cells[0].window = (30.0, 30.0)  # it never opened
    assert list(numbers(result).cells["goodput"]) == [0]


def test_a_page_without_requests_is_no_error(tmp_path: Path) -> None:
    """Guards an hour of measuring against a page that cannot be written: a claim about a class
    without requests, and windows in which none began."""
    result = run(cells("a", 1.0), cells("b", 0.8))
    claim_fields = {"arm": "b", "over": "a", "of": "ttft", "at": 4}
    claim = Claim("c", **claim_fields, at_most=1, request_class=COLD)
    result.study = msgspec.structs.replace(result.study, claims=(claim,))
    assert "| c | 4 | at most 1 | - | no verdict |" in shown(result)
    change(result, "a", lambda o: {"counted": False})
    change(result, "b", lambda o: {"counted": False})
    cli.write(result, tmp_path, cli.Console(quiet=True))
    assert "**no verdict**" in (tmp_path / "page.md").read_text()


def test_warnings_name_the_client_the_caches_and_errors() -> None:
    late, failed = cells("a", 1.0, late_s=0.2), cells("b", 1.0, failed=True)
    late[0].unflushed = ["http://secret:1: HTTP Error 404: Not Found"]
    result = run(late, failed)
    result.missing = ["pd-stock"]
    client, caches, missing, errors = warnings(result, numbers(result))
    assert "a at 4 (200 and 0 ms)" in client and "b at" not in client
    assert "1 server did not" in caches and "secret" not in caches
    assert "pd-stock" in missing and f"b at 4 sessions at once: {3 * REQUESTS} abort" in errors
    result = run(cells("a", 1.0, loop_lag_s=0.3, answer="x"), cells("b", 1.0, answer="y"))
    result.fleet = {**result.fleet, "flush": False}
    lag, kept, differ = warnings(result, numbers(result))
    assert "a at 4 (0 and 300 ms)" in lag and "Caches were not emptied" in kept
    assert "120 of 120 answers differ between arms" in differ
    result = run(cells("a", 1.0))
    window = Window(requests=REQUESTS, of_class=21)
    load = LoadSpec((4,), window=window)
    result.study = msgspec.structs.replace(result.study, load=load, made=Made())
    (few,) = warnings(result, numbers(result))
    assert few.endswith(": a at 4 (40, 0 of FIRST, 0 of LATER).") and "began within 300 s" in few


def test_a_page_by_address_names_the_sender_and_the_servers() -> None:
    """Guards against numbers without a commit, the sender's machine in place of the servers', and
    one server against two without a warning."""
    result = run(cells("a", 1.0), cells("b", 0.8))
    assert "a machine; SGLang 1, commit c0; fresh servers" in shown(result)
    result.fleet = {**result.fleet, "rig": False}
    pair = {"aggregated": 0, "prefill": 1, "decode": 1}
    result.servers["b"], result.titles = pair, {"a": "1 aggregated", "b": "pd"}
    text, about = shown(result), summary(result)
    assert "by address (1 aggregated, pd: 1P 1D; the question counts the rig's)" in text
    assert "sent from a machine, commit c0 of this project; the servers' own" in text
    assert "different numbers of servers** (1 aggregated: 1, pd: 2)" in text
    assert about["sent_from"] == {"machine": "a machine", "sglang": "1", "commit": "c0"}
    assert about["date"] == "2026-01-01" and "machine" not in about and "sglang" not in about


def counting(cell: Cell) -> None:
    """Fill in two workers, of which the first gets more; a cold prompt; and the servers'
    counters."""
    for i, o in enumerate(cell.outcomes):
        more = {"decode_worker": "xy"[i % 2], "prompt_tokens": (120, 40)[i % 2]}
        cell.outcomes[i] = msgspec.structs.replace(
            o, **more, first_token_s=i + 0.1, itl_s=(0.1,) * 4
        )
    cold = {"first_token_s": 3.25, "counted": False}
    cell.outcomes.append(outcome(3, 0.2, request_class=COLD, **cold))
    counters = {"sglang:kv_transfer_sent_bytes_total": 5e6}
    for number, stage in enumerate(STAGES, 1):
        counters[f"sglang:kv_transfer_{stage}_seconds_sum"] = number * 0.01
        counters[f"sglang:kv_transfer_{stage}_seconds_count"] = 10.0
    cell.gained = {"prefill": counters}
    cell.samples = [0.25, 0.5]
    cell.loopback = 7e6


def test_the_page_is_well_formed_and_holds_the_summary(tmp_path: Path) -> None:
    """Guards the tables: as many cells in each row as in the head, and the numbers of the committed
    summary. Columns without counts and classes with few requests are omitted."""
    result = run(cells("a", 1.0), cells("b", 0.8))
    assert shown(result).split("\n\n")[1] == verdict(result) and "What the servers" not in shown(
        result
    )
    for cell in result.cells:
        counting(cell)
    cli.write(result, tmp_path, cli.Console(quiet=True))
    text = (tmp_path / "page.md").read_text()
    whole = json.loads((tmp_path / "summary.json").read_text())
    described, heavy = whole["loads"]["4"]["b"], whole["loads"]["4"]["b"]["classes"]["HEAVY"]
    tables = re.findall(r"(?:^\|.*\n?)+", text, re.MULTILINE)
    assert len(tables) == 6
    for table in tables:
        assert len({line.count("|") for line in table.strip().splitlines()}) == 1
    assert "load.svg" in text and "sessions at once" in (tmp_path / "load.svg").read_text()
    counted = "| 122 KB [122, 122] | 171 KB | 38% / 50% | 1.50 | 0.24 "
    assert counted + "| 1.00 / 2.00 / 3.00 / 4.00 ms |" in text
    value, low, high = described["of_first_arm"]["e2e_mean"]
    assert f"| **{value:.2f} [{low:.2f}, {high:.2f}]** |" in text
    shares = [f"{heavy[f'e2e_{name}'] * 1e3:,.0f}" for name in ("mean", "p50", "p90", "p99")]
    assert f"| {' / '.join(shares)} ms |" in text and heavy["requests"] == 60
    heavy["requests"] = 29
    assert page(whole, {}).count("| HEAVY |") == text.count("| HEAVY |") - 1 == 1
    value, low, high = described["numbers"]["lost_tokens"]
    assert f"| {value:.1f} [{low:.1f}, {high:.1f}] |" in text


def test_an_event_costs_the_tokens_that_running_answers_lose() -> None:
    """Guards the account of a prefill: two answers with a token every 10 ms, one of which stalls
    for the 200 ms of a cold prompt; a third began after it."""

    def answer_of(index: int, first_s: float, gaps: list[float]) -> Outcome:
        return outcome(index, 1.0, first_token_s=first_s, itl_s=tuple(gaps))

    stalled = [0.01] * 50 + [0.21] + [0.01] * 49
    cold = outcome(3, 0.2, request_class=COLD, started_s=0.505, first_token_s=0.705)
    failed = outcome(4, 0.2, request_class=COLD, started_s=1.0, error="timeout")
    others = [answer_of(0, 0.0, [0.01] * 150), answer_of(1, 0.0, stalled), answer_of(2, 0.8, [])]
    cell = Cell("a", 0, 4, outcomes=[*others, cold, failed], window=(0.0, 1.5))
    found = events(cell)
    assert found["prefills"] == 1 and found["running"] == pytest.approx(2)
    assert found["prefill_s"] == pytest.approx(0.2)
    assert found["tpot_outside"] == pytest.approx(0.01, rel=0.02)
    assert found["tpot_within"] == pytest.approx(0.02, rel=0.05)
    assert found["lost_tokens"] == pytest.approx(20, abs=1)
    assert found["lost_s"] == pytest.approx(0.2, abs=0.01)
    assert found["share_lost"] == pytest.approx(0.5, abs=0.03)
    # A prefill that began before the window is no event of it, and its time is excluded.
    cell.window = (0.6, 1.5)
    assert events(cell) == {}
    again = msgspec.structs.replace(cold, started_s=1.0, first_token_s=1.1)
    cell.outcomes.append(again)
    assert events(cell)["tpot_outside"] == pytest.approx(0.01, rel=0.05)
    cell.outcomes = [*others, failed]
    assert events(cell) == {}


def test_runs_are_kept_and_compared(tmp_path: Path) -> None:
    """Guards the files, and against a comparison of runs with different requests."""
    result = run(cells("a", 1.0))
    record.save(tmp_path, result)
    with record.begin(tmp_path, result):
        pass
    again = record.load(tmp_path)
    assert [c.outcomes for c in again.cells] == [c.outcomes for c in result.cells]
    torn = (tmp_path / record.REQUESTS).read_bytes()
    with (tmp_path / record.REQUESTS).open("ab") as lines:
        record.append(lines, Cell("b", 0, 4), outcome(0, 1.0))
        lines.write(torn[:50])
    assert record.load(tmp_path).cells == again.cells
    record.begin(tmp_path, None).close()
    with pytest.raises(ValueError, match="holds no"):
        record.load(tmp_path)  # another run, during its first load
    other = run(cells("a", 0.5))
    other.environment["commit"] = "c1"
    both = cli.merged(result, other)
    assert "**after: a is best**" in verdict(both)
    assert both.environment["commit"] == "c0 and c1" and both.environment["machine"] == "a machine"
    assert list(both.servers) == list(both.titles) == ["before: a", "after: a"]
    for field in ("requests", "prompt_tokens", "output_tokens"):
        other.trace = {**result.trace, field: 7}
        with pytest.raises(ValueError, match="different requests"):
            cli.merged(result, other)
    with pytest.raises(ValueError, match="it is not the folder"):
        record.load(tmp_path / "nothing")
