"""Plans of chaos runs: repeatable, with every kind of fault; and the servers of each arm."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from chaos.arms import BACKENDS, WHOLE, make_arms
from chaos.bank import agreed
from chaos.families import FAMILIES, make_model, rounded, serve
from chaos.plan import (
    CURRENT_EVERY_S,
    HEAVY,
    LIGHT,
    LOCAL,
    STORE,
    WEIGHTS,
    Faults,
    Plan,
    make_plans,
)
from chaos.servers import LEAD, chaos_config, current_config

THREADS = (5,) * 8


def kinds(plan: Plan) -> set[object]:
    return {fault.kind for fault in plan.faults}


def test_a_seed_is_a_plan() -> None:
    """Guards against a failure that cannot be repeated, and against a seed that changes nothing."""
    first, again, other = (make_plans(seed, [Faults()] * 2, 60.0, THREADS) for seed in (3, 3, 4))
    assert first == again != other
    assert first[0].sends != first[1].sends


@pytest.mark.parametrize("seed", range(30))
def test_the_long_run_holds_every_fault(seed: int) -> None:
    """Guards against a kind of fault that an arm never meets although its name promises it."""
    for heavy in (HEAVY, (*HEAVY, *STORE)):
        for arm in make_plans(seed, [Faults(heavy)] * 4, 150.0, THREADS):
            assert kinds(arm) == {*heavy, *LIGHT}
    lights = (*LIGHT, *LOCAL)
    arms = make_plans(seed, [Faults(light=lights)] * 4, 150.0, THREADS)
    assert set.union(*map(kinds, arms)) == {*HEAVY, *lights}
    current = Faults(light=lights)
    (arm,) = make_plans(seed, [current], 600.0, THREADS, every_s=CURRENT_EVERY_S)
    assert kinds(arm) == {*HEAVY, *lights}


@pytest.mark.parametrize("seed", range(30))
def test_a_run_of_all_holds_pairs_and_the_whole_system(seed: int) -> None:
    """Guards against a part that a run without options leaves out, and against a fault that meets
    only the plain pairs, or no server of a backend."""
    arms = make_arms("both", "both", None)
    assert {arm.backend for arm in arms if arm.whole} == set(BACKENDS)
    assert {arm.backend for arm in arms if not arm.whole} == set(BACKENDS)
    plans = make_plans(seed, [arm.faults for arm in arms], 150.0, THREADS)
    of_whole = [kinds(plan) for arm, plan in zip(arms, plans, strict=True) if arm.whole]
    assert set.union(*of_whole) == {*HEAVY, *STORE, *WEIGHTS, *LIGHT, *LOCAL}
    (alone,) = make_arms("nixl", "64", WHOLE)
    assert (alone.name, alone.faults) == ("nixl-64-whole", arms[1].faults)


def test_the_arms_of_the_later_release_differ_in_the_lead_only(tmp_path: Path) -> None:
    """Guards against a comparison of two stock pairs, or of two different configurations."""
    for lead, stock in zip(
        current_config(tmp_path, "nixl", 16, stock=False).layout(),
        current_config(tmp_path, "nixl", 16, stock=True).layout(),
        strict=True,
    ):
        assert lead.env == {**stock.env, "SGLANG_PATCHSET": "1", **LEAD}
        assert stock.env["SGLANG_PATCHSET"] == "0" and not LEAD.keys() & stock.env.keys()
        # Ports are new for each pair.
        assert [a for a in stock.command if not a.isdecimal()] == [
            a for a in lead.command if not a.isdecimal()
        ]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_pair_of_a_family(tmp_path: Path, family: str) -> None:
    """Guards against an arm that runs the dense model under a family's name, or at a page size that
    the family's index lacks; and against extra ranks on prefill instead of decode."""
    served = FAMILIES[family]
    arms = make_arms("both", "both", None, family)
    assert [(arm.backend, arm.page_size, arm.whole) for arm in arms] == [
        (backend, served.page_size, False) for backend in BACKENDS
    ]
    assert all(arm.family == family in arm.name for arm in arms)
    (local,) = make_arms("nixl", "1", {"local": True}, family)
    assert (local.local, local.page_size) == (True, 1)
    config = chaos_config(tmp_path, tmp_path, "nixl", served.page_size)
    prefill, decode = (server.command for server in serve(config, family).layout())
    assert ("--enable-dp-attention" in decode) == ("--tp-size" in decode) == served.has_decode_dp
    assert "--enable-dp-attention" not in prefill and "--tp-size" not in prefill
    for command in (prefill, decode):
        assert command[command.index("--page-size") + 1] == str(served.page_size)
        assert set(served.arguments) <= set(command)
    assert serve(config, "") == config


@pytest.mark.parametrize("family", FAMILIES)
def test_the_model_of_a_family(tmp_path: Path, family: str) -> None:
    """Guards against a family without a model, and against new weights that equal the old."""
    folders = [make_model(tmp_path / str(seed), family, seed) for seed in (0, 1)]
    folders.append(rounded(folders[0], tmp_path / "rounded", 0))
    old, new, near = ((folder / "model.safetensors").read_bytes() for folder in folders)
    assert old != new != near != old and len(old) == len(near)


def test_a_token_that_rounding_decides_is_not_expected(tmp_path: Path) -> None:
    """Guards against answers called wrong that another order of additions makes right, and against
    a server left with weights that belong to no bank."""
    answers = {"model": [1, 2, 3, 4], "near": [1, 2, 9, 9], "nearer": [1, 2, 3, 9], "far": [8, 8]}
    loaded = ["model"]

    def ask(prompts: Sequence[list[int]], new_tokens: int) -> list[list[int]]:
        return [answers[loaded[-1]][:new_tokens] for _ in prompts]

    def expected(*others: str) -> list[list[int]]:
        paths = [Path(name) for name in others]
        return agreed(ask, lambda path: loaded.append(path.name), Path("model"), paths)([[5]], 4)

    assert expected() == [[1, 2, 3, 4]] and loaded == ["model"]
    assert expected("nearer", "near") == [[1, 2]]
    assert expected("far") == [[1]]
    assert loaded[-1] == "model"
