"""Feature groups on SGLang's real classes: one misfitting mixin, in a fresh interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import cpu_standin
from sglang.srt.patchset import GROUPS

CPU = {"device": "cpu", "attention_backend": "torch_native", "disable_cuda_graph": True}
DECODE = CPU | {"disaggregation_mode": "decode", "disaggregation_decode_enable_radix_cache": True}
STARTS = {
    "plain": CPU,
    "nixl": DECODE | {"disaggregation_transfer_backend": "nixl"},
    "mooncake": DECODE
    | {
        "disaggregation_transfer_backend": "mooncake",
        "disaggregation_decode_fallback_prefill_tokens": 64,
    },
    "buffer_only": CPU
    | {
        "enable_hierarchical_cache": True,
        "hicache_storage_backend": "file",
        "hicache_host_memory_mode": "buffer_only",
    },
    "writes": DECODE
    | {
        "disaggregation_transfer_backend": "nixl",
        "disaggregation_decode_enable_offload_kvcache": True,
        "hicache_storage_backend": "file",
        "hicache_host_memory_mode": "buffer_only",
    },
}
FLAGS = {
    "nixl": "--disaggregation-decode-enable-radix-cache",
    "mooncake": "--disaggregation-decode-enable-radix-cache",
    "buffer_only": "--hicache-host-memory-mode buffer_only",
    "writes": "--disaggregation-decode-enable-radix-cache",
}
#: Optional mixins of each start's scheduler.
OPTIONAL = {
    "nixl": "DisaggScheduler",
    "mooncake": "DisaggScheduler LocalTurnsScheduler",
    "buffer_only": "BufferOnlyScheduler StoreScheduler",
    "writes": "DisaggScheduler OffloadScheduler StoreScheduler",
}
DISAGG = "sglang.srt.disaggregation"
SCHEDULER = "sglang.srt.managers.scheduler:Scheduler"


@pytest.mark.parametrize(
    ("misfits", "stock", "refused"),
    [
        # Independent groups together, which saves an interpreter for each.
        pytest.param(
            {"nixl_async": f"{DISAGG}.nixl.conn:NixlKVManager", "buffer_only": SCHEDULER},
            {"nixl_async", "buffer_only", "decode_offload"},
            {"nixl": "nixl_async", "buffer_only": "buffer_only", "writes": "nixl_async"},
            marks=pytest.mark.nightly,
        ),
        (
            {
                "nixl_async": f"{DISAGG}.nixl.conn:NixlKVSender",
                "mooncake_delta": f"{DISAGG}.mooncake.conn:MooncakeKVSender",
                "buffer_only": "sglang.srt.mem_cache.hiradix_cache:HiRadixCache",
            },
            {"nixl_async", "mooncake_delta", "buffer_only", "decode_offload"},
            {
                "nixl": "nixl_async",
                "mooncake": "mooncake_delta",
                "buffer_only": "buffer_only",
                "writes": "nixl_async",
            },
        ),
        (
            {"decode_radix": SCHEDULER},
            {"decode_radix", "decode_offload"},
            {"nixl": "decode_radix", "mooncake": "decode_radix", "writes": "decode_radix"},
        ),
        (
            {"delta": f"{DISAGG}.prefill:SchedulerDisaggregationPrefillMixin"},
            {"delta", "nixl_async", "mooncake_delta", "decode_radix", "decode_offload"},
            {"nixl": "delta", "mooncake": "delta", "writes": "delta"},
        ),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else None,
)
def test_a_misfit_leaves_its_group_stock(
    model_config: Any, misfits: dict[str, str], stock: set[str], refused: dict[str, str]
) -> None:
    """Guards against half a feature: such a server started without the other half's checks, and
    requests hung. No class may keep a part of the group, and no flag may rely on it."""
    seen = run_program(model_config(), misfits, STARTS)
    names = {group.name for group in GROUPS}
    assert {name for name, state in seen["states"].items() if state == "stock"} == stock
    assert set(seen["mixed_in"]) == names - stock
    for name in names - stock:
        (group,) = [group for group in GROUPS if group.name == name]
        assert seen["mixed_in"][name] == [row.target for row in group.rows]
    for start, ended in seen["ended"].items():
        if start not in refused:
            assert ended == started(start)
            continue
        group = refused[start]
        assert ended.startswith(f"PatchsetError: {FLAGS[start]} needs the feature group {group} of")
        assert f"{misfits[group]} does not fit" in ended and "renamed_by_upstream" in ended


def test_an_older_nixl_leaves_its_group_stock(model_config: Any, tmp_path: Path) -> None:
    """Guards against servers that refuse to start with an older NIXL without any flag."""
    (tmp_path / "nixl-1.2.0.dist-info").mkdir()
    metadata = tmp_path / "nixl-1.2.0.dist-info/METADATA"
    metadata.write_text("Metadata-Version: 2.1\nName: nixl\nVersion: 1.2.0\n")
    (tmp_path / "nixl").mkdir()
    (tmp_path / "nixl/__init__.py").touch()
    (tmp_path / "nixl/_api.py").write_text(
        "class nixl_agent: pass\nclass nixl_agent_config: pass\n"
    )
    plain = {
        mode: CPU | {"disaggregation_mode": mode, "disaggregation_transfer_backend": "nixl"}
        for mode in ("prefill", "decode")
    }
    seen = run_program(model_config(), {}, STARTS | plain, PYTHONPATH=str(tmp_path))
    states = seen["states"]
    assert states.pop("nixl_async") == "stock" and set(states.values()) == {"attached"}
    assert "nixl_async" not in seen["mixed_in"]
    refused = seen["ended"].pop("nixl")
    assert seen["ended"].pop("writes") == refused
    reason = "nixl 1.2.0 is installed, 1.5 or newer is needed"
    assert refused.startswith(f"PatchsetError: {FLAGS['nixl']} needs the feature group nixl_async")
    assert refused.endswith(reason)
    assert all(ended == started(name) for name, ended in seen["ended"].items())
    assert seen["stderr"].count(reason) == 1


@pytest.mark.parametrize(
    ("disabled", "off", "refused"),
    [
        (
            "mooncake_delta,buffer_only",
            {"mooncake_delta", "buffer_only", "decode_offload"},
            "mooncake buffer_only writes",
        ),
        pytest.param("nixl_async", {"nixl_async"}, "nixl writes", marks=pytest.mark.nightly),
        pytest.param(
            "decode_radix",
            {"decode_radix", "decode_offload"},
            "nixl mooncake writes",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            "delta",
            {"delta", "nixl_async", "mooncake_delta", "decode_radix", "decode_offload"},
            "nixl mooncake writes",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_a_group_is_switched_off_by_name(
    model_config: Any, disabled: str, off: set[str], refused: str
) -> None:
    """Guards against a dependent group that stays, a flag refused without the reason, and other
    groups that are switched off."""
    seen = run_program(model_config(), {}, STARTS, SGLANG_PATCHSET_DISABLE=disabled)
    assert {name for name, state in seen["states"].items() if state == "off"} == off
    assert set(seen["mixed_in"]) == {group.name for group in GROUPS} - off
    for name, ended in seen["ended"].items():
        if name in refused.split():
            assert ended.startswith("PatchsetError:") and "SGLANG_PATCHSET_DISABLE" in ended
        else:
            assert ended == started(name)


def started(start: str) -> str:
    """Return the result of a start that reaches SGLang's constructor, with its flags' mixins."""
    return f"StartedError: {OPTIONAL.get(start, '')}"


def run_program(model: str, misfits: dict[str, str], starts: dict[str, Any], **env: str) -> Any:
    """Return the program's result, with its stderr."""
    program = Path(__file__).with_name("program_groups.py")
    command = [sys.executable, "-W", "ignore", program, model]
    done = subprocess.run(
        [*command, json.dumps(misfits), json.dumps(starts)],
        env=cpu_standin.environment(os.environ | env),
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1]) | {"stderr": done.stderr}
