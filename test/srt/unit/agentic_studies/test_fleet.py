"""fleet.yaml and the rig's arms: refusals, and started servers."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

import cpu_standin
from benchmark.agentic.fleet import rig, spec
from benchmark.agentic.fleet import servers as servers_of_a_setup
from benchmark.agentic.fleet.servers import Servers, usage
from benchmark.agentic.fleet.spec import FleetFile
from benchmark.agentic.report.numbers import numbers
from benchmark.agentic.studies.record import Cell
from benchmark.agentic.studies.run import order
from benchmark.agentic.studies.spec import FOLDER, Study, find
from benchmark.harness import metrics, servers
from benchmark.harness.client import Target
from benchmark.harness.models import REPOSITORY, TINY_ARITH, kv_bytes_per_token
from unit.agentic_studies.test_numbers import outcome, run

ROLES = ("aggregated", "prefill", "decode")
RADIX = "--disaggregation-decode-enable-radix-cache"
SLEEPLESS = {
    *(
        "demo",
        "hicache",
        "lead_burst",
        "lead_mooncake",
        "lead_turns",
        "throughput",
        "throughput_8gpu",
        "whole",
    ),
    *("wire", "worth"),
}
"""Studies with servers that must not sleep."""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("agregated: [http://a]", "agregated"),
        ("aggregated: http://a", r"\$.aggregated"),
        ("aggregated: [a:30000]", "'a:30000' is not an http URL"),
        ("prefill: [{url: http://p}]", "`prefill` and `decode` must be given together"),
        ("prefill: [{url: http://p, bootstrap_port: x}]\ndecode: [http://d]", "bootstrap_port"),
        ("model: m", "no servers"),
        ("router: http://r\napi_key_env: NOT_SET_ANYWHERE", "NOT_SET_ANYWHERE"),
        ("router: http://r\nrig: {}", "remove the addresses"),
        ("router: http://r\nblock_tokens: 0", r"\$.block_tokens"),
        ("router: http://r\nendpoint: grpc", r"\$.endpoint"),
        ("setups: {a: {store: http://s}}", r"setups\[...\]"),
        ("router: [", "fleet.yaml"),
    ],
)
def test_a_bad_file_is_refused_by_key(text: str, message: str, tmp_path: Path) -> None:
    """Guards against an hour of measuring on an unintended fleet."""
    path = tmp_path / "fleet.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as error:
        spec.load(path, FleetFile)
    assert "fleet.yaml" in str(error.value)


def test_roles_at_the_top_are_setups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY", "k")
    path = tmp_path / "fleet.yaml"
    path.write_text(
        "aggregated: [http://a, http://b]\ndecode: [http://d]\nprefill: [{url: http://p}]\n"
        "setups: {old: {router: http://r}}\napi_key_env: KEY\nheaders: {X-Team: t}\n"
    )
    fleet = spec.load(path, FleetFile)
    setups = fleet.named()
    assert list(setups) == ["old", "aggregated", "pd"]
    assert setups["pd"].engines == {"http://p": "prefill", "http://d": "decode"}
    assert fleet.all_headers == {"X-Team": "t", "Authorization": "Bearer k"}
    assert "k" not in map(str, fleet.public().values())


def test_every_shipped_study_is_valid_and_names_what_it_starts() -> None:
    """Guards the YAML files: arms with equal numbers of engines, enough rounds for a verdict, and
    two loads if there is one arm."""
    for path in FOLDER.glob("*.yaml"):
        study = spec.load(find(path.stem), Study)
        engines = {arm.aggregated + arm.prefill + arm.decode for arm in study.arms.values()}
        assert len(study.arms) >= 2 or study.grid
        assert len(engines) == 1 and (study.rounds >= 3 or path.stem == "replay"), path


def test_arms_of_the_rig_differ_only_where_declared() -> None:
    """Equal pools for all servers, flags on the arm's decode servers only, engines behind the
    client."""
    for path in FOLDER.glob("*.yaml"):
        arms = spec.load(path, Study).arms.values()
        doze = all(arm.sleeps for arm in arms)
        assert doze != (path.stem in SLEEPLESS), path
        for arm in arms:
            layout = rig.layout(arm, spec.Rig(pool_tokens=5000), TINY_ARITH, doze=doze)
            shared = arm.store is not None and arm.store.shared_tokens > 0
            assert (layout[0].role == "store") == shared
            assert (layout[-1].role == "router") == (arm.policy != "none")
            engines = [c for c in layout if c.role not in ("router", "store")]
            roles = [engine.role for engine in engines]
            assert roles == (
                ["prefill"] * arm.prefill
                + ["decode"] * arm.decode
                + ["aggregated"] * arm.aggregated
            )
            for engine in engines:
                command = " ".join(engine.command)
                assert engine.command[: len(rig.LOW_PRIORITY)] == rig.LOW_PRIORITY
                assert "--max-total-tokens 5000" in command
                assert ("--sleep-on-idle" in command) == doze
                is_decode, declared = (
                    engine.role == "decode",
                    " ".join(arm.args.get(engine.role, ())),
                )
                assert declared in command
                of_variant = is_decode and arm.variant in ("radix", "local")
                assert (RADIX in command) == (of_variant or RADIX in declared)
                local = f"--disaggregation-decode-local-tokens {arm.local_tokens}" in command
                assert local == (is_decode and arm.variant == "local")
                assert engine.env["SGLANG_PATCHSET"] == ("0" if arm.variant == "stock" else "1")
                on_standin = cpu_standin.FOLDER in engine.environment().get("PYTHONPATH", "")
                assert on_standin == ("--device cpu" in command)
                assert arm.env.items() <= engine.env.items()
                python = REPOSITORY / arm.venv / "bin/python" if arm.venv else sys.executable
                assert engine.command[len(rig.LOW_PRIORITY)] == str(python)


@pytest.mark.parametrize("arms", ["ab", "abc", "abcde"])
def test_arms_change_places(arms: str) -> None:
    """Guards against an arm that always follows the same arm, or always comes first."""
    rounds = [order(list(arms), number) for number in range(2 * len(arms))]
    assert {sum(order_.index(arm) for order_ in rounds) for arm in arms} == {
        (len(arms) - 1) * len(arms)
    }


def test_arms_of_a_store_differ_in_memory_and_mode() -> None:
    """Guards against an arm with more memory than the other, or with another policy, which would be
    measured instead of the mode."""
    arms = [arm for arm in spec.load(find("hicache"), Study).arms.values() if arm.store]
    capacities = [_capacities(rig.layout(arm, spec.Rig(), TINY_ARITH)[1].command) for arm in arms]
    assert capacities == [(arm.store.host_tokens, arm.store.shared_tokens) for arm in arms]
    first, second = map(sum, capacities)
    assert first == second


@pytest.mark.parametrize("name", ["whole", "whole_answers"])
def test_arms_of_the_whole_system_have_the_same_memory(name: str) -> None:
    """Guards against an arm that is better because it has more memory for KV, or that uses it
    differently from its title."""
    study = spec.load(find(name), Study)
    reads, writes = "--enable-hierarchical-cache", servers.WRITES[0]
    uses = {}
    for title, arm in study.arms.items():
        engines = [c for c in rig.layout(arm, spec.Rig(), TINY_ARITH) if c.role in ROLES]
        uses[title] = [[flag in engine.command for flag in (reads, writes)] for engine in engines]
        capacities = [_capacities(engine.command) for engine in engines]
        assert sum(map(sum, capacities)) == 96_800, title
        flags = [dict(zip(c.command, (*c.command[1:], ""), strict=True)) for c in engines]
        assert sum(int(flag["--max-total-tokens"]) for flag in flags) == 2 * spec.Rig().pool_tokens
    reading, writing, neither = [True, False], [False, True], [False, False]
    for title, flags_used in uses.items():
        second = writing if study.arms[title].store.writes else neither
        assert flags_used == [reading, reading if title.startswith("agg") else second]


def _capacities(command: tuple[str, ...]) -> tuple[int, int]:
    """Return the tokens of a server's host pool or staging buffer, and of its part of the store."""
    flags = dict(zip(command, (*command[1:], ""), strict=True))
    pages = int(flags.get("--hicache-buffer-pages", 0))
    if ratio := flags.get("--hicache-ratio"):
        # SGLang cuts the product to a token and then to a page, and adds a page.
        pages = int(float(ratio) * spec.Rig().pool_tokens) // 16 + 1
    store = json.loads(flags.get("--hicache-storage-backend-extra-config", "{}"))
    assert store.get("prefetch_threshold", 16) == 16
    return pages * 16, store.get("global_segment_size", 0) // kv_bytes_per_token(TINY_ARITH)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{host_tokens: 1, buffer_only: true}", "need `shared_tokens`"),
        ("{host_tokens: 1, shared_tokens: 1, writes: true}", "needs `buffer_only`"),
    ],
)
def test_a_store_that_no_server_takes_is_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "store.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        spec.load(path, spec.Store)


class FakeServers(Servers):
    """A rig's servers with a store that removes its keys at the second `clear`, or never."""

    def __init__(self, *arguments: Any, removes: bool = True, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.asked: list[str] = []
        self._keys, self._removes = 2.0, removes

    def _ask(self, method: str, url: str) -> bytes:
        if url.endswith("/metrics"):
            return f"master_key_count {self._keys}\n".encode()
        self.asked.append(url)
        self._keys -= self._removes and url.endswith("clear")
        return b""


def test_the_store_of_the_rig_is_emptied_before_a_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a load that reads the previous load's results: Mooncake keeps recently used
    keys. A fleet's own store is never emptied."""
    monkeypatch.setattr(servers_of_a_setup, "FLUSH_S", 1.0)
    setup = spec.Setup(
        prefill=(spec.Prefill("http://p"),), decode=("http://d",), store="http://store"
    )
    arguments = (setup, FleetFile(setups={"pd": setup}), Target("http://d"), range(9))
    fleet = FakeServers(*arguments)
    assert fleet.flush() == [] and not any("clear" in url for url in fleet.asked)
    rig_servers = FakeServers(*arguments, owned=True)
    assert rig_servers.flush() == []
    assert rig_servers.asked[-2:] == ["http://p/hicache/storage-backend/clear"] * 2
    assert FakeServers(*arguments, owned=True, removes=False).flush() == [
        "the store: it kept some keys"
    ]


def test_a_fleet_without_an_arms_servers_says_so() -> None:
    """Guards the mapping of arms to setups: by name, several where the study wants all, never
    none."""
    study = spec.load(find("worth"), Study)
    setup = spec.Setup(aggregated=("http://a",))
    arms, missing = study.at({"aggregated": setup, "mine": setup})
    assert list(arms) == ["aggregated", "mine"]
    assert missing == ["pd-stock", "pd-patched", "pd-radix", "pd-local"]
    with pytest.raises(ValueError, match="the fleet has setups x, and the study asks for agg"):
        spec.load(find("prefill_events"), Study).at({"x": setup})
    with pytest.raises(ValueError, match="there are: break_even, break_even_8gpu, capac"):
        find("no-such-study")


def test_pool_usage_is_read_from_a_metrics_page() -> None:
    text = (
        "# HELP sglang:token_usage x\n"
        'sglang:token_usage{model_name="m",tp_rank="0"} 0.25\n'
        'sglang:num_running_reqs{model_name="m"} 3.0\nsglang:num_running_reqs_offline_batch 9\n'
    )
    assert usage(text) == [0.25]
    assert usage("vllm:num 1\n") == []
    ranks = "".join(
        f'sglang:token_usage{{dp_rank="{rank}",model_name="m"}} {share}\n'
        for rank, share in enumerate((0.5, 0.75, 1.0, 0.75))
    )
    assert usage(ranks) == [0.75], "four pools are no fuller than one can be"


def test_counters_that_did_not_answer_twice_are_left_out() -> None:
    """Guards against counting bytes of weeks, or of half of the servers, for one load: a server may
    fail to answer before the load or after it."""
    setup = spec.Setup(
        prefill=(spec.Prefill("http://p"), spec.Prefill("http://q")), decode=("http://d",)
    )
    fleet = FleetFile(setups={"pd": setup})
    pages = {"http://p": 100.0, "http://q": 1e12, "http://d": 5.0}
    silent = {"http://q"}

    class Scraped(Servers):
        def _scrape(self, url: str) -> dict[str, float]:
            if url in silent:
                raise OSError("timed out")
            return {"sent": pages[url]}

    servers = Scraped(setup, fleet, Target("http://d"), range(9))
    before = servers.counters()
    silent.clear()
    pages.update({"http://p": 107.0, "http://d": 9.0})
    assert servers.gained(before) == {"decode": {"sent": 4.0}}
    before = servers.counters()
    pages["http://q"] += 3
    assert servers.gained(before)["prefill"] == {"sent": 3.0}
    silent.add("http://p")
    assert servers.gained(before) == {"decode": {"sent": 0.0}}


def test_memory_for_kv_sums_all_servers_of_a_role() -> None:
    """Guards the column that shows equal memory of all arms: device pools, host pools or staging
    buffers, and the store; a decode server reports its staging buffer in pages only."""
    setup = spec.Setup(
        prefill=(spec.Prefill("http://p"),), decode=("http://d",), store="http://store"
    )
    pages = {
        "http://p": {metrics.POOL_TOKENS: 100, metrics.HOST_TOKENS: 32, metrics.STAGED_PAGES: 2},
        "http://d": {metrics.POOL_TOKENS: 50, metrics.STAGED_PAGES: 4},
        "http://store": {metrics.STORE_BYTES: 900},
    }

    class Scraped(Servers):
        def _scrape(self, url: str) -> dict[str, float]:
            return dict(pages[url])

    fleet = FleetFile(setups={"pd": setup}, block_tokens=16)
    servers = Scraped(setup, fleet, Target("http://d"), range(9), token_bytes=2)
    gained = servers.gained(servers.counters())
    kinds = (servers_of_a_setup.DEVICE_MEMORY, servers_of_a_setup.MEMORY)
    assert {role: [bytes_.get(kind, 0) for kind in kinds] for role, bytes_ in gained.items()} == {
        "prefill": [200, 64],
        "decode": [100, 128],
        "store": [0, 900],
    }
    result = run([Cell("a", 0, 4, gained=gained, outcomes=[outcome(0, 1.0)])])
    row = numbers(result).cells.loc["4", "a"].mean()
    shown = [row[f"{kind}_bytes"] for kind in ("device", "host", "store", "memory")]
    assert shown == [300, 192, 900, 1392]


def test_a_heavy_request_is_heavy_on_every_fleet() -> None:
    """Guards `offload` by address, where blocks are 32 times as long as on the rig: with the rig's
    threshold nearly every request would leave its server."""
    for arm in spec.load(find("offload"), Study).arms.values():
        if arm.prefill:
            assert arm.routing(16)[:2] == ("--heavy-threshold", "625")
            assert arm.routing(512)[:2] == ("--heavy-threshold", "20000")
            assert "--max-offload-inflight" in arm.routing(512)
