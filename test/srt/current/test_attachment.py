"""How the group ``lead`` comes to a real SGLang 0.5.23: by its plugin loader, and not unasked."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any  # Any: settings of SGLang and their values

import pytest

from current.decode import Decode
from sglang.srt import runtime_context
from sglang.srt.disaggregation import lead
from sglang.srt.disaggregation.lead import attach
from sglang.srt.patchset.__main__ import NAME, PLUGINS, report_current
from sglang.srt.plugins import load_plugins_by_group

HERE = Path(lead.__path__[0])


@pytest.mark.server()
def test_sglang_finds_the_plugin(decode: Decode) -> None:
    """Guards against an entry point that the loader of this release does not look for."""
    function, _ = load_plugins_by_group(PLUGINS)[NAME]
    assert function is attach.activate


@pytest.mark.server()
def test_with_nothing_set_no_method_differs(decode: Decode) -> None:
    """Guards against a part that is on because the package is installed. The server is up, and
    SGLang's loader has run."""
    assert attach.attached == []
    wrapped: list[tuple[type, str]] = []

    def note(owner: type, name: str, signature: str) -> Callable[[object], object]:
        wrapped.append((owner, name))
        return lambda ours: ours

    for part in attach.PARTS:
        importlib.import_module(f"{attach.__package__}.{part.name}").install(note)
    for owner, name in wrapped:
        method = getattr(owner, name)
        assert not Path(method.__code__.co_filename).is_relative_to(HERE), f"{owner}.{name}"


@pytest.mark.server()
def test_every_part_fits_this_release() -> None:
    """Guards against a method of SGLang that is not as a part expects it, as ``--check`` says."""
    text, status = report_current(check=True)
    assert status == 0, text


class Changed:
    """Settings of a server, but for one."""

    def __init__(self, settings: Any, name: str, value: Any) -> None:
        self._settings = settings
        setattr(self, name, value)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._settings, name)


REFUSED = {
    ("get_disagg", "disaggregation_transfer_backend", "mooncake"): (
        "--disaggregation-transfer-backend other than nixl"
    ),
    ("get_disagg", "disaggregation_decode_enable_offload_kvcache", True): (
        "--disaggregation-decode-enable-offload-kvcache"
    ),
    ("get_disagg", "disaggregation_decode_host_receive_threshold", 0.5): (
        "--disaggregation-decode-host-receive-threshold"
    ),
    ("get_disagg", "disaggregation_decode_retraction_backup", "host_pool"): (
        "--disaggregation-decode-retraction-backup host_pool"
    ),
    ("get_parallel", "attn_dcp_size", 2): "--dcp-size",
    ("get_memory", "enable_unified_memory", True): "--enable-unified-memory",
    ("get_memory", "enable_session_radix_cache", True): "--enable-session-radix-cache",
    ("get_model", "kv_cache_dtype", "nvfp4"): "--kv-cache-dtype with scales",
    ("get_schedule", "enable_priority_scheduling", True): "--enable-priority-scheduling",
    ("get_serving", "enable_streaming_session", True): "--enable-streaming-session",
    ("get_exec.moe", "moe_a2a_backend", "deepep"): "--moe-a2a-backend",
    ("get_exec.overlap", "enable_two_batch_overlap", True): "--enable-two-batch-overlap",
    ("get_exec.deterministic", "enable_deterministic_inference", True): (
        "--enable-deterministic-inference"
    ),
    ("get_spec", "speculative_algorithm", "EAGLE3"): "--speculative-algorithm other than EAGLE",
    ("get_spec", "speculative_eagle_topk", 2): "--speculative-eagle-topk above 1",
    ("get_spec", "enable_multi_layer_eagle", True): "--enable-multi-layer-eagle",
    ("get_spec", "speculative_adaptive", True): "--speculative-adaptive",
    ("get_spec", "speculative_use_rejection_sampling", True): (
        "--speculative-use-rejection-sampling"
    ),
}


@pytest.mark.server(env={"SGLANG_DISAGGREGATION_DECODE_ADMISSION": "remaining"})
@pytest.mark.parametrize(("change", "reason"), REFUSED.items(), ids=REFUSED.values())
def test_what_was_not_tried_is_refused_by_name(
    decode: Decode,
    monkeypatch: pytest.MonkeyPatch,
    change: tuple[str, str, Any],
    reason: str,
) -> None:
    """Guards against a server that starts where no part has run: other pools, other batches, or
    (Mooncake) a prefill server that releases no rooms."""
    assert list(attach.not_tried(decode.scheduler)) == []
    (getter, _, group), name, value = change[0].partition("."), *change[1:]
    settings = getattr(runtime_context, getter)()
    changed = Changed(getattr(settings, group) if group else settings, name, value)
    given = Changed(settings, group, changed) if group else changed
    monkeypatch.setattr(runtime_context, getter, lambda: given)
    assert list(attach.not_tried(decode.scheduler)) == [reason]


@pytest.mark.server(env={"SGLANG_DISAGGREGATION_DECODE_ADMISSION": "remaining"})
def test_staging_buffers_are_refused(decode: Decode, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are a variable of SGLang's."""
    monkeypatch.setenv("SGLANG_DISAGG_STAGING_BUFFER", "1")
    assert list(attach.not_tried(decode.scheduler)) == ["SGLANG_DISAGG_STAGING_BUFFER"]
