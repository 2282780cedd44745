"""Reasons of refused settings: ranks and host memory."""

from __future__ import annotations

from typing import Any  # Any: a dispatcher of SGLang

import pytest

from sglang.srt.arg_groups.overrides import resolved_view
from sglang.srt.server_args import prepare_server_args


@pytest.mark.server()
def test_receiving_in_host_memory_needs_a_refused_setting(model: str) -> None:
    """Guards against KV that waits in host memory, which the parts do not count: SGLang sets a
    backup that is refused. No transfer backend of this release supports it."""
    pair = "--disaggregation-mode", "decode", "--disaggregation-transfer-backend", "nixl"
    threshold = "--disaggregation-decode-host-receive-threshold", "0.5"
    args = prepare_server_args(["--model-path", model, "--device", "cpu", *pair, *threshold])
    args.resolve_once()
    assert resolved_view(args).disaggregation_decode_retraction_backup == "host_pool"


@pytest.mark.server()
@pytest.mark.parametrize("name", ["MooncakeEP", "NixlEP", "Pplx"])
def test_experts_that_are_reached_by_decode_steps_only(name: str) -> None:
    """Guards a reason of a refused ``--moe-a2a-backend``: SGLang raises for a chunk."""
    from sglang.srt.layers.dp_attention import set_is_extend_in_batch
    from sglang.srt.layers.moe import token_dispatcher
    from sglang.srt.layers.moe.utils import DeepEPMode

    kind: Any = getattr(token_dispatcher, f"{name}Dispatcher")
    dispatcher = kind.__new__(kind)
    dispatcher.deepep_mode, dispatcher._low_latency_dispatcher = DeepEPMode.AUTO, "decode"
    set_is_extend_in_batch(False)
    assert dispatcher._get_impl() == "decode"
    set_is_extend_in_batch(True)
    with pytest.raises(NotImplementedError):
        dispatcher._get_impl()


@pytest.mark.server()
def test_deepep_for_decode_steps_has_no_room_for_a_chunk() -> None:
    """Guards the reason of the refused ``--deepep-mode low_latency``: a chunk is sent like a decode
    step, and is longer than the buffers for that. In ``auto`` all ranks send it as a prompt."""
    from sglang.srt.environ import envs
    from sglang.srt.layers.moe.utils import DeepEPMode
    from sglang.srt.patchset import environment

    assert DeepEPMode.AUTO.resolve(is_extend_in_batch=True) == DeepEPMode.NORMAL
    assert DeepEPMode.LOW_LATENCY.resolve(is_extend_in_batch=True) == DeepEPMode.LOW_LATENCY
    longest = envs.SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK.get()
    assert longest < environment.LOCAL_CHUNK.default
