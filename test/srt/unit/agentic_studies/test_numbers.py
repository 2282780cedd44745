"""Numbers and sentences of a page: what is called a difference, and what is not."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmark.agentic.fleet import spec
from benchmark.agentic.fleet.spec import Arm
from benchmark.agentic.load.outcome import Outcome
from benchmark.agentic.load.steady import Made, Window
from benchmark.agentic.report.events import events
from benchmark.agentic.report.numbers import (
    STAGES,
    STATISTICS,
    Interval,
    Level,
    levels,
    plain,
    quantile,
)
from benchmark.agentic.report.page import html, page
from benchmark.agentic.report.summary import summary
from benchmark.agentic.report.verdict import answer, best, breaks, standing, warnings
from benchmark.agentic.studies import cli, record
from benchmark.agentic.studies.load import cold, prepare
from benchmark.agentic.studies.record import Cell, Run
from benchmark.agentic.studies.run import later
from benchmark.agentic.studies.spec import LoadSpec, Point, Study, TraceSpec, find
from benchmark.harness.report import write_summary
from benchmark.traces.generate import generate
from benchmark.traces.read import write

REQUESTS = 40


def outcome(index: int, e2e_s: float, *, failed: bool = False, late_s: float = 0.0) -> Outcome:
    return Outcome(
        index=index,
        session_id=f"s{index // 2}",
        prompt_tokens=100,
        wanted_tokens=5,
        trace_new_tokens=100,
        cached_tokens=50,
        output_tokens=5,
        request_class=("WARM", "HEAVY")[index % 2],
        scheduled_s=float(index),
        started_s=float(index),
        finished_s=index + e2e_s,
        late_s=late_s,
        ttft_s=None if failed else e2e_s / 2,
        tpot_s=None if failed else 0.01,
        e2e_s=e2e_s,
        error="abort" if failed else None,
    )


def cells(arm: str, scale: float, rounds: int = 3, load: float = 4, **more: Any) -> list[Cell]:
    """Requests of very different lengths, the same in all arms, and some noise a round."""
    made = []
    for number in range(rounds):
        noise = random.Random(f"{arm} {number}")
        times = [(1 + i % 7) * scale * noise.uniform(0.9, 1.1) for i in range(REQUESTS)]
        outcomes = [outcome(i, seconds, **more) for i, seconds in enumerate(times)]
        made.append(Cell(arm, number, load, outcomes=outcomes))
    return made


def run(*of: list[Cell], rounds: int = 3) -> Run:
    names = list(dict.fromkeys(cell.arm for each in of for cell in each))
    study = Study(
        title="A title",
        question="Which?",
        arms={name: Arm(title=name, aggregated=1) for name in names},
        load=LoadSpec(sessions=(4,)),
        rounds=rounds,
        slo=spec.Slo(ttft_s=2.0, tpot_s=0.05),
    )
    trace: dict[str, Any] = {
        "requests": REQUESTS,
        "prompt_tokens": 1,
        "output_tokens": 1,
        "left_out": 0,
    }
    trace |= {"source": "a trace", "ratio": 1.0, "classes": "WARM < HEAVY"}
    lengths = {"mean": 1, "p50": 1, "p90": 1, "p99": 1}
    told = {"requests": 1, "sessions": 1, "multi_turn_sessions": 0.5, "hit": 0.5}
    trace["described"] = {**told, "input_tokens": lengths, "output_tokens": lengths}
    fleet = spec.load(spec.RIG, spec.FleetFile).public()
    environment = {"date": "2026-01-01", "machine": "a machine", "sglang": "1", "commit": "c0"}
    all_cells = [cell for each in of for cell in each]
    titles = {name: name for name in names}
    return Run(study, titles, [], fleet, environment, "the command", trace, all_cells)


def shown(made: Run, figures: dict[str, str]) -> str:
    return page(made, summary(made, levels(made)), figures)


def test_a_difference_is_one_beyond_its_interval() -> None:
    """Guards against a page that names a winner of noise, or none where there is one: requests vary
    sevenfold, which paired draws take out."""
    made = run(cells("a", 1.0), cells("b", 0.8), cells("c", 0.81))
    text = answer(made, levels(made))
    assert "**no arm is best**" in text and "b has 0.80 [" in text
    assert "end-to-end time of a" in text and "of c" not in text
    clear = run(cells("a", 1.0), cells("b", 0.8))
    assert "**b is best**: it has 0.80 [" in answer(clear, levels(clear))
    same = run(cells("a", 1.0), cells("b", 1.0))
    assert "**no verdict**" in answer(same, levels(same))


def test_an_arm_that_wins_by_one_quantity_is_not_best() -> None:
    """Guards against a headline that calls an arm best whose answers begin five times as late."""
    made = run(cells("a", 1.0), cells("b", 1.0))
    for cell in made.at("b", Point(4)):
        cell.outcomes = [
            msgspec.structs.replace(o, tpot_s=0.005, ttft_s=o.ttft_s * 5) for o in cell.outcomes
        ]
    text = answer(made, levels(made))
    assert "**a trade**: a has 0.2" in text and "is best" not in text
    assert re.search(r"times the TTFT.* of b, and b 0\.50 \[.*\] times the TPOT of a\.$", text)


def test_a_grid_says_at_how_many_loads() -> None:
    """Guards the first sentence of a grid: goodput is better where it is more, times where less."""
    ratio = {1: Interval(0.5, 0.4, 0.6), -1: Interval(2, 1.5, 3), 0: Interval(0.9, 0.8, 1.1)}
    assert all(standing("itl", of) == of_time for of_time, of in ratio.items())
    assert all(standing("goodput", of) == -of_time for of_time, of in ratio.items())
    made = run(cells("a", 1.0), cells("b", 0.5), cells("a", 1.0, load=8), cells("b", 1.0, load=8))
    made.study = msgspec.structs.replace(
        made.study, made=Made(), grid={"turns": (2,)}, load=LoadSpec((4, 8), window=Window())
    )
    text = answer(made, levels(made))
    assert text.startswith(
        "Of 2 loads, against a: **b** is better in TTFT at 1, worse at 0; in ITL"
    )


WINS = st.sets(st.sampled_from(["ttft", "tpot", "itl", "e2e", "goodput"]))


@given(st.data(), st.integers(2, 4))
def test_the_best_arm_loses_in_nothing(data: st.DataObject, count: int) -> None:
    """Guards the rule itself, for any comparisons: at most one arm is best, none that another is
    better than in anything, none without a win, and equal arms never."""
    arms = [str(i) for i in range(count)]
    wins = {(a, b): sorted(data.draw(WINS)) for a in arms for b in arms if a != b}
    found = best(arms, wins)
    for arm in arms:
        others = [o for o in arms if o != arm]
        fit = all(wins[arm, o] for o in others) and not any(wins[o, arm] for o in others)
        assert (found == arm) == fit
    assert best(arms, dict.fromkeys(wins, ())) is None


def test_equal_arms_get_a_verdict_on_one_page_of_twenty() -> None:
    """Guards against a winner of noise that all requests of a round share, as of a machine that is
    busy with something else: three rounds say little about their spread, draws of them less, and
    several loads and quantities are several chances."""
    named = 0
    for number in range(100):
        rng = random.Random(number)
        arms = []
        for name in ("a", "b"):
            for load in (4, 8):
                for row in range(3):
                    busy = rng.lognormvariate(0, 0.1)
                    times = [(1 + i % 7) * busy * rng.uniform(0.9, 1.1) for i in range(REQUESTS)]
                    outcomes = [*map(outcome, range(REQUESTS), times)]
                    arms.append([Cell(name, row, load, outcomes=outcomes)])
        found = run(*arms)
        named += answer(found, levels(found)).count("**no verdict**") < 2
    assert named <= 5
    # Where they agree, three rounds are enough.
    clear = run(cells("a", 1.0), cells("b", 0.9))
    assert "**b is best**" in answer(clear, levels(clear))


def test_fewer_than_three_rounds_give_no_verdict() -> None:
    made = run(cells("a", 1.0, rounds=2), cells("b", 0.1, rounds=2), rounds=2)
    assert answer(made, levels(made)).startswith("**No verdict: 2 rounds")
    table = shown(made, {}).split("95 % intervals")[1].split("## By class")[0]
    assert "**0." not in table


def test_failed_requests_count_as_the_time_limit() -> None:
    """Guards against an arm that is fast because what was slow in it failed."""
    (level,) = levels(run(cells("a", 1.0), cells("b", 0.5, failed=True)))
    assert plain(level.values("b", "e2e")) == 60.0
    assert np.isnan(level.values("b", "tpot")).all() and level.goodput("b") == 0
    assert plain(level.values("b", "slo")) == 0 and level.failed("b") == 3 * REQUESTS


def test_quantiles_are_values_and_draws_are_the_same_for_all_arms() -> None:
    values = np.array([3.0, 1.0, 2.0, 4.0])
    assert [plain(values, quantile(p)) for p in (25, 50, 90, 100)] == [1, 2, 4, 4]
    assert np.isnan(plain(np.array([np.nan])))
    (level,) = levels(run(cells("a", 1.0)))
    mine = level.values("a", "e2e")
    for of in STATISTICS.values():
        ratio = level.ratio(mine * 2, mine, of)
        assert (ratio.value, ratio.low, ratio.high) == pytest.approx((2, 2, 2))
    interval = level.interval(mine)
    assert interval.low < interval.value < interval.high
    heavy = level.values("a", "e2e", "HEAVY")
    assert np.isnan(heavy[:, ::2]).all() and not np.isnan(heavy[:, 1::2]).any()


def test_an_arm_that_answered_nothing_is_not_best() -> None:
    """Guards the comparison by TPOT, of which failed requests have none."""
    made = run(cells("dead", 1.0, failed=True), cells("b", 1.0))
    for cell in made.at("dead", Point(4)):  # which fails at once
        cell.outcomes = [msgspec.structs.replace(o, e2e_s=0.01) for o in cell.outcomes]
    text = answer(made, levels(made))
    assert "**b is best**" in text and "nan" not in text
    made.cells = made.at("b", Point(4))
    assert answer(made, levels(made)).startswith("At 4 sessions at once, b has a mean end-to-end")


def test_a_miss_that_is_not_told_is_a_miss() -> None:
    """Guards the hit rate on OpenAI's endpoints: SGLang leaves out how much was cached where that
    is nothing, so that only hits would count."""
    made = run(cells("a", 1.0))
    for cell in made.cells:
        cell.outcomes = [
            msgspec.structs.replace(o, cached_tokens=None if o.index % 4 else 100)
            for o in cell.outcomes
        ]
    (level,) = levels(made)
    assert level.hit_rate("a") == 0.25
    for cell in made.cells:
        cell.outcomes = [msgspec.structs.replace(o, cached_tokens=None) for o in cell.outcomes]
    assert np.isnan(levels(made)[0].hit_rate("a"))


def test_an_arm_breaks_where_the_slo_is_missed() -> None:
    made = run(cells("a", 0.1), cells("b", 0.1), cells("a", 0.2, load=8), cells("b", 3.0, load=8))
    held, broken = breaks(made, levels(made))
    assert held.startswith("**a** meets the SLO at every load")
    assert "up to 4 sessions at once. At 8," in broken
    made = run(cells("b", 3.0))
    assert "misses the SLO at the first load. At 4," in next(breaks(made, levels(made)))
    assert "TTFT at most 2 s and TPOT at most 50 ms" in shown(made, {})


def test_warnings_name_the_client_the_caches_and_errors() -> None:
    late, failed = cells("a", 1.0, late_s=0.2), cells("b", 1.0, failed=True)
    late[0].unflushed = ["http://secret:1: HTTP Error 404: Not Found"]
    made = run(late, failed)
    made.missing = ["pd-stock"]
    client, caches, missing, errors = warnings(made, levels(made))
    assert "a at 4 (200 and 0 ms)" in client and "b at" not in client
    assert "1 server did not" in caches and "secret" not in caches
    assert "pd-stock" in missing and f"b at 4 sessions at once: {3 * REQUESTS} abort" in errors
    made = run(cells("a", 1.0))
    made.fleet = {**made.fleet, "flush": False}
    (kept,) = warnings(made, levels(made))
    assert "Caches were not emptied" in kept
    made = run(cells("a", 1.0))
    made.cells[0].cold = [outcome(0, 1.0), outcome(1, 1.0, failed=True)]
    (beside,) = warnings(made, levels(made))
    assert "a at 4 sessions at once, 1 of 2 prompts of cold clients failed" in beside


def test_a_page_by_address_says_who_sent_and_how_many_servers_there_were() -> None:
    """Guards against numbers of nobody's commit, the sender's machine in the servers' place, and
    one server against two with no word about it."""
    made = run(cells("a", 1.0), cells("b", 0.8))
    assert "a machine; SGLang 1, commit c0; fresh servers" in shown(made, {})
    assert summary(made, [])["machine"] == "a machine"
    made.fleet = {**made.fleet, "rig": False}
    text = shown(made, {})
    assert "a fleet by address, generate endpoint" in text  # of an earlier version
    assert "sent from a machine, commit c0 of this project; the servers' own" in text
    about = summary(made, [])
    assert about["sent_from"] == {"machine": "a machine", "sglang": "1", "commit": "c0"}
    assert about["date"] == "2026-01-01" and "machine" not in about and "sglang" not in about

    one = {"aggregated": 1, "prefill": 0, "decode": 0}
    pair = {"aggregated": 0, "prefill": 1, "decode": 1}
    made.servers = {"a": one, "b": one}
    assert "by address (1 aggregated in every arm; the question" in shown(made, {})
    assert not list(warnings(made, levels(made)))
    made.servers, made.titles = {"a": one, "b": pair}, {"a": "1 aggregated", "b": "pd"}
    text = shown(made, {})
    assert "by address (1 aggregated, pd: 1P 1D; the question counts the rig's)" in text
    assert "different numbers of servers** (1 aggregated: 1, pd: 2)" in text
    assert summary(made, [])["servers"] == made.servers
    made.servers["b"] = dict.fromkeys(pair, 0)
    assert "pd: behind a router" in shown(made, {})
    assert not list(warnings(made, levels(made)))


def test_the_summary_holds_what_the_page_shows(tmp_path: Path) -> None:
    """Guards tables whose numbers no program finds again: what is committed is the summary."""
    made = run(cells("a", 1.0), cells("b", 0.8))
    for cell in made.cells:
        more(cell)
        cell.samples = [{"usage": 0.25}, {"usage": 0.75}, {"usage": 0.5}]
    found = levels(made)
    write_summary(tmp_path / "summary.json", summary(made, found))
    told = json.loads((tmp_path / "summary.json").read_text())["loads"]["4"]["b"]
    rows = [line.strip("| ").split(" | ") for line in shown(made, {}).splitlines()]

    def row_of(columns: int) -> list[str]:
        """The arm's row in the table of so many columns."""
        (row,) = (row for row in rows if row[0] == "b" and len(row) == columns)
        return row

    at_once, pool = row_of(14)[10:12]
    assert at_once == "{mean:.1f} / {most}".format(**told["at_once"])
    assert pool == "{p50:.0%} / {max:.0%}".format(**told["pool"]) == "50% / 75%"
    ratios = [told["of_first_arm"][q][s] for q in ("ttft", "tpot", "e2e") for s in ("mean", "p90")]
    for text, (value, low, high) in zip(row_of(7)[1:], ratios, strict=True):
        assert text.strip("*") == f"{value:.2f} [{low:.2f}, {high:.2f}]"

    rows = [row[2:] for row in rows if row[:2] == ["4", "b"]]
    heavy = next(row for row in rows if row[0] == "HEAVY")
    assert heavy[1] == str(told["classes"]["HEAVY"]["requests"])
    times = told["classes"]["HEAVY"]["e2e"].values()
    assert heavy[-1] == " / ".join(f"{x * 1e3:,.0f}" for x in times) + " ms"
    shares, hits = zip(*(each.values() for each in told["by_worker"]), strict=True)
    assert [" / ".join(f"{x:.0%}" for x in each) for each in (shares, hits)] == next(
        row[:2] for row in rows if row[-1] == "1.50"
    )
    stages = [f"{told['transfers']:.0f}", *(f"{x * 1e3:.2f} ms" for x in told["stages"].values())]
    assert stages == ["10", "1.00 ms", "2.00 ms", "3.00 ms", "4.00 ms"] and stages in rows
    event = told["prefill_events"]
    value, low, high = (f"{x * 1e3:,.0f}" for x in event["lost"])
    row = next(row for row in rows if f"{value} ms [{low}, {high}]" in row)
    value, low, high = event["lost_tokens"]
    assert (
        value == pytest.approx(0.5, abs=0.01) and row[4] == f"{value:.1f} [{low:.1f}, {high:.1f}]"
    )
    tpot = f"{event['tpot_outside'] * 1e3:,.1f} / {event['tpot_within'] * 1e3:,.1f} ms"
    assert row[0] == str(event["prefills"]) and row[2] == f"{event['running']:.1f}"
    assert row[3] == tpot and row[6] == f"{event['share_lost']:.2f}"
    late = [f"{told['client'][name] * 1e3:.1f} ms" for name in ("late_p99", "read_late_p99")]
    means = ", ".join(f"{x * 1e3:,.0f}" for x in told["rounds"]) + " ms"
    assert [told["reached"], *late, means] in rows


def test_the_page_is_well_formed() -> None:
    """Each table's rows have as many cells as its head, else it is not shown as one."""
    made = run(cells("a", 1.0), cells("b", 0.8))
    text = shown(made, {"A figure": "figure.png"})
    assert text.split("\n\n")[1] == answer(made, levels(made))
    tables = re.findall(r"(?:^\|.*\n?)+", text, re.MULTILINE)
    assert len(tables) == 4
    assert html(text, "t").count("<table>") == 4 and "figure.png" in html(text, "t")
    for cell in made.cells:
        more(cell)
    text = shown(made, {})
    tables = re.findall(r"(?:^\|.*\n?)+", text, re.MULTILINE)
    assert len(tables) == 7
    for table in tables:
        assert len({line.count("|") for line in table.strip().splitlines()}) == 1
    assert "| 4 | b | 75% / 25% | 40% / 80% | 1.50 |" in text
    assert "| 4 | a | 10 | 1.00 ms | 2.00 ms | 3.00 ms | 4.00 ms |" in text


def more(cell: Cell) -> None:
    """Two workers, of which the first gets the most; a cold client; and what prefill counts."""
    workers = {True: ("x", 120, 48), False: ("y", 40, 32)}
    for i, o in enumerate(cell.outcomes):
        name, prompt, cached = workers[i % 2 == 0]
        cell.outcomes[i] = msgspec.structs.replace(
            o, decode_worker=name, prompt_tokens=prompt, cached_tokens=cached, first_token_s=i + 0.1
        )
        cell.outcomes[i] = msgspec.structs.replace(cell.outcomes[i], itl_s=(0.1,) * 4)
    cell.cold = [msgspec.structs.replace(outcome(3, 0.2), first_token_s=3.25)]
    counters = {}
    for number, stage in enumerate(STAGES, 1):
        counters[f"sglang:kv_transfer_{stage}_seconds_sum"] = number * 0.01
        counters[f"sglang:kv_transfer_{stage}_seconds_count"] = 10.0
    cell.gained = {"prefill": counters}


def test_an_event_costs_what_running_answers_lack_of_their_rate() -> None:
    """Guards the account of a prefill: two answers with a token every 10 ms, one of which stands
    still for the 200 ms of a cold prompt; a third began after it."""

    def of(index: int, first_s: float, gaps: list[float]) -> Outcome:
        return msgspec.structs.replace(
            outcome(index, 1.0), first_token_s=first_s, itl_s=tuple(gaps)
        )

    stands = [0.01] * 50 + [0.21] + [0.01] * 49
    cell = Cell("a", 0, 4, outcomes=[of(0, 0.0, [0.01] * 150), of(1, 0.0, stands), of(2, 0.8, [])])
    cold = msgspec.structs.replace(outcome(0, 0.2), started_s=0.505, first_token_s=0.705)
    failed = msgspec.structs.replace(outcome(1, 0.2), started_s=1.0, error="timeout")
    cell.cold = [cold, failed]
    (level,) = levels(run([cell]))
    found = events(level, "a")
    assert found is not None and found.prefills == 1 and found.running == pytest.approx(2)
    assert found.ttft.value == pytest.approx(0.2)
    assert found.tpot_outside == pytest.approx(0.01, rel=0.02)
    assert found.lost_tokens.value == pytest.approx(20, abs=1)
    assert found.lost.value == pytest.approx(0.2, abs=0.01)
    assert found.tpot_within == pytest.approx(0.02, rel=0.05)
    assert found.share_lost == pytest.approx(0.5, abs=0.03)
    # When the load ends, the cold client's next prompt is under way, and nothing is known of it.
    late = [0.01] * 90 + [0.5] + [0.01] * 20
    cell.outcomes = [of(0, 0.0, late), of(1, 0.0, late)]
    cell.cold = [msgspec.structs.replace(cold, finished_s=0.705)]
    unaware = events(level, "a")
    assert unaware is not None and unaware.tpot_outside == pytest.approx(0.01, rel=0.02)
    # Nothing is under way before its pause is over, though, however short a load is.
    cell.cold = [msgspec.structs.replace(cold, started_s=-0.3, first_token_s=-0.1, finished_s=-0.1)]
    assert events(level, "a") is None
    level.cold_gap_s = 0.5
    paused = events(level, "a")
    assert paused is not None and paused.tpot_outside == pytest.approx(0.01, rel=0.03)
    cell.cold = [failed]
    assert events(level, "a") is None


def test_prefill_events_are_held_against_the_first_arm_that_has_them() -> None:
    """Guards a page that says what an arm loses less than one that had no cold client."""
    made = run(cells("quiet", 1.0), cells("b", 1.0), cells("c", 1.0))
    for cell in [*made.at("b", Point(4)), *made.at("c", Point(4))]:
        more(cell)
    text = shown(made, {}).split("## Per prefill")[1].split("\n\n")[1]
    assert "is lost than with b." in text
    made = run(cells("quiet", 1.0), cells("b", 1.0))
    for cell in made.at("b", Point(4)):
        more(cell)
    assert "Gained" not in shown(made, {}).split("## Per prefill")[1].split("\n\n")[1]


def test_clients_of_a_load_share_a_clock() -> None:
    """Guards events against a cold client's own clock, whose 0 is its first prompt."""
    moved = later(msgspec.structs.replace(outcome(2, 1.0), first_token_s=2.5), 0.25)
    assert (moved.started_s, moved.first_token_s, moved.finished_s) == (2.25, 2.75, 3.25)
    assert moved.sent_s is None and moved.e2e_s == 1.0


def test_runs_are_kept_and_compared(tmp_path: Path) -> None:
    """Guards the files, and against comparing what was sent other requests."""
    made = run(cells("a", 1.0))
    record.save(tmp_path, made)
    with (tmp_path / record.REQUESTS).open("wb") as lines:
        for cell in made.cells:
            for o in cell.outcomes:
                record.append(lines, cell, o, cold=False)
            record.append(lines, cell, outcome(0, 9.0), cold=True)
    again = record.load(tmp_path)
    assert [c.outcomes for c in again.cells] == [c.outcomes for c in made.cells]
    assert [len(c.cold) for c in again.cells] == [1, 1, 1]
    with record.begin(tmp_path, again):
        pass
    torn = (tmp_path / record.REQUESTS).read_bytes()
    stray = Cell("b", 0, 4)
    with (tmp_path / record.REQUESTS).open("ab") as lines:
        record.append(lines, stray, outcome(0, 1.0), cold=False)
        lines.write(torn[:50])
    assert record.load(tmp_path).cells == again.cells
    both = cli.merged(made, run(cells("a", 0.5)))
    assert "**after: a is best**" in answer(both, levels(both))
    assert both.environment["commit"] == "c0"
    other = run(cells("a", 1.0))
    other.environment["commit"] = "c1"
    other.servers = {"a": {"aggregated": 2, "prefill": 0, "decode": 0}}
    both = cli.merged(made, other)
    assert both.environment["commit"] == "c0 and c1" and both.environment["machine"] == "a machine"
    assert both.servers == {"after: a": other.servers["a"]}
    for much in ("requests", "prompt_tokens", "output_tokens"):
        other.trace = {**made.trace, much: 7}
        with pytest.raises(ValueError, match="different requests"):
            cli.merged(made, other)
    with pytest.raises(ValueError, match="it is not the folder"):
        record.load(tmp_path / "nothing")


def test_the_trace_is_sampled_and_scaled(tmp_path: Path) -> None:
    """Whole sessions, about as many requests as asked, each within half a pool; what is left out is
    counted; a rate stretches times."""
    file = tmp_path / "trace.jsonl"
    write(file, generate(3000, 1))
    fleet = spec.load(spec.RIG, spec.FleetFile, rig={"pool_tokens": 2048}, max_answer_tokens=9)
    trace = prepare(TraceSpec(file=str(file), requests=100, max_single_turn=0.5), fleet)
    assert 50 <= len(trace.records) + trace.left_out <= 200 and trace.left_out > 0
    sent = f"{len(trace.records)} requests are sent where about 100 were asked for"
    assert trace.notes[0].startswith(sent)
    assert all(r.input_length + r.output_length <= 1024 for r in trace.records)
    assert max(r.output_length for r in trace.records) == 9
    with pytest.raises(ValueError, match="about 1 requests of 3,000 .*`--requests`"):
        prepare(TraceSpec(file=str(file), requests=1), fleet)
    records = trace.at(LoadSpec(rate=(4.0,)), 4.0)
    fast, slow = (trace.at(LoadSpec(speed=(s,)), s)[-1].timestamp for s in (2.0, 1.0))
    assert fast * 2 == slow == trace.at(LoadSpec(sessions=(1,)), 1)[-1].timestamp
    assert records[-1].timestamp / 1000 == pytest.approx(len(records) / 4, rel=0.05)
    whole = prepare(TraceSpec(requests=None, generated=60, generated_per_s=2.0), fleet).records
    assert len(whole) < 60 and 10 < whole[-1].timestamp / 1000 < 90
    prompts = cold(TraceSpec(cold_tokens=5000), fleet, 1)
    assert prompts[0].input_length == 156 and len(prompts[0].hash_ids) == 10
    assert len({i for r in prompts for i in r.hash_ids}) == 10 * len(prompts)
    assert {r.session_id for r in prompts} == {"cold1"}


def test_what_is_wrong_with_a_trace_is_told(tmp_path: Path) -> None:
    """Guards against a study of fewer requests than its trace has, or of an hour that was replayed
    in four seconds, without a word."""
    file = tmp_path / "trace.jsonl"
    late = (msgspec.structs.replace(r, timestamp=r.timestamp / 1000) for r in generate(300, 1))
    write(file, late)
    fleet = spec.load(spec.RIG, spec.FleetFile)
    (unit,) = prepare(TraceSpec(file=str(file), requests=None), fleet).notes
    assert "trace.jsonl: 300 requests" in unit and "seem to be s " in unit
    file.write_text("broken\n" + file.read_text())
    with pytest.raises(ValueError, match="line 1: "):
        prepare(TraceSpec(file=str(file)), fleet)
    left_out = prepare(TraceSpec(file=str(file), requests=None, skip_invalid=True), fleet).notes[0]
    assert "1 invalid line was left out" in left_out and "line 1: " in left_out


def test_a_study_refuses_what_makes_no_sense() -> None:
    arm = {"title": "a", "aggregated": 1}
    good = {"title": "t", "question": "q", "arms": {"a": arm}, "load": {"sessions": [1]}}
    msgspec.convert(good, Study)
    for wrong, says in (
        ({"load": {"sessions": [1], "rate": [1.0]}}, "one of `sessions`, `rate` and `speed`"),
        ({"load": {"sessions": [0]}}, "more than 0"),
        ({"arms": {}}, "`arms` is empty"),
        ({"arms": {"a": {**arm, "variant": "fast"}}}, "`variant` is one of"),
        ({"arms": {"a": {**arm, "variant": "local"}}}, "`local_tokens`"),
        ({"arms": {"a": {**arm, "policy": "best"}}}, "`policy` is one of"),
        ({"arms": {"a": {"title": "a", "decode": 1}}}, "must be given together"),
        ({"rounds": 0}, "`rounds`"),
    ):
        with pytest.raises(msgspec.ValidationError, match=says):
            msgspec.convert({**good, **wrong}, Study)
    assert find("worth.yaml").name == "worth.yaml"


def test_levels_take_the_rounds_that_all_arms_have() -> None:
    """Guards a run that was stopped between two arms."""
    (level,) = levels(run(cells("a", 1.0), cells("b", 1.0, rounds=2)))
    assert isinstance(level, Level) and level.rounds == 2
    assert level.values("a", "e2e").shape == (2, REQUESTS)
