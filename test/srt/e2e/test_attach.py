"""The flag reaches schedulers however they start: by ``Engine`` in a program, for each DP rank."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmark.harness import metrics
from benchmark.harness.pair import Pair
from benchmark.harness.ports import allocate_ports
from e2e.support import START_METHOD, Reference, pair_config, prompt_maker, settle

ATTACHED = "decode radix cache is on"

ENGINE = """
import sys
import sglang
if __name__ == "__main__":
    engine = sglang.Engine(
        model_path=sys.argv[1], device="cpu", dtype="float32", attention_backend="torch_native",
        sampling_backend="pytorch", disable_cuda_graph=True, disable_piecewise_cuda_graph=True,
        max_total_tokens=2000, disaggregation_mode="decode", disaggregation_transfer_backend="nixl",
        disaggregation_decode_enable_radix_cache=True, nccl_port=int(sys.argv[2]),
        skip_server_warmup=True, log_level="info",
    )
    print("ENGINE IS UP", flush=True)
    engine.shutdown()
"""


@pytest.mark.nightly
def test_engine_in_a_program(model: Path, tmp_path: Path) -> None:
    """Engine spawns its scheduler from the user's own program, where no launcher of ours runs.
    ``component/patchset/test_processes.py`` sees it attached in every run."""
    script = tmp_path / "program.py"
    script.write_text(ENGINE)
    (port,) = allocate_ports(1)
    run = subprocess.run(
        [sys.executable, str(script), str(model), str(port)],
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    output = run.stdout + run.stderr
    assert "ENGINE IS UP" in run.stdout, output[-3000:]
    assert ATTACHED in output


@pytest.mark.nightly
def test_two_data_parallel_decode_ranks(model: Path, reference: Reference, logs: Path) -> None:
    """The DP controller spawns its schedulers itself; each must have the tree, and a request must
    be answered right whichever rank gets it. In every run ``component/patchset/test_processes.py``
    sees such schedulers attached, and ``test_ranks.py`` compares the answers of two trees."""
    tokens = prompt_maker(model, seed=7)
    shared = tokens(120)
    prompts = [[*shared, *tokens(5 + i)] for i in range(8)]
    config = pair_config(
        model,
        logs,
        page_size=16,
        decode_args=("--dp-size", "2"),
        decode_env={START_METHOD: "spawn"},
    )
    with Pair(config, logs) as pair:
        for _ in range(2):
            assert pair.generate(prompts, 12) == reference.answers(prompts, 12)
        settle(pair)
        assert pair.processes["decode"].log_text().count(ATTACHED) == 2
        assert pair.metrics()[1][metrics.HIT_TOKENS] > 0


@pytest.mark.nightly
def test_two_data_parallel_prefill_ranks_in_turns(
    model: Path, reference: Reference, logs: Path
) -> None:
    """Guards against requests that decode announces to another rank than prefill's: half of them
    failed by their deadlines. In every run ``component/prefill/test_served_rooms.py`` looks at what
    decode is told."""
    prompts = [prompt_maker(model, seed=8)(30 + i) for i in range(8)]
    config = pair_config(
        model,
        logs,
        page_size=16,
        prefill_args=("--dp-size", "2", "--load-balance-method", "round_robin"),
        prefill_env={START_METHOD: "spawn"},
    )
    with Pair(config, logs) as pair:
        assert pair.generate(prompts, 12) == reference.answers(prompts, 12)
        settle(pair)
        told = pair.processes["prefill"].log_text()
        assert all(f"DP{rank}] Prefill batch" in told for rank in (0, 1))
