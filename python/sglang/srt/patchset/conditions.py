"""Conditions of refused settings (``refusals``) that ``flags.is_given`` cannot express.

``args`` has the attributes of ``ServerArgs``, ``config`` those of ``ModelConfig``.
"""

from __future__ import annotations

from typing import Any  # Any: an object with the attributes of ServerArgs or ModelConfig

from sglang.srt.patchset.flags import DELTA_BACKENDS, FLAG, OFFLOAD, ON, is_given, writes_to_store


def is_in_a_pair(args: Any) -> bool:
    moves_deltas = args.disaggregation_transfer_backend in DELTA_BACKENDS
    return moves_deltas and args.disaggregation_mode != "null"


def writes_nothing(args: Any) -> bool:
    return writes_to_store(args) and not (is_given(args, FLAG) and is_given(args, OFFLOAD))


def reserves_less_than_a_page(args: Any) -> bool:
    return args.page_size is not None and args.num_reserved_decode_tokens < args.page_size


def dispatches_decode_steps_only(args: Any) -> bool:
    return args.moe_a2a_backend in ("mooncake", "nixl")


def drafts_behind_a_cache(args: Any) -> bool:
    loads_prompts = args.disaggregation_mode == "prefill" or is_given(args, ON)
    return loads_prompts and bool(args.speculative_algorithm)


def hf_configs(config: Any) -> list[Any]:
    names = "hf_config", "hf_text_config"
    return [found for name in names if (found := getattr(config, name, None)) is not None]


def has_window_pool(config: Any) -> bool:
    return bool(getattr(config, "is_hybrid_swa", False))


def has_state_layers(config: Any) -> bool:
    # All configurations of such models have this property. Check the class, because reading the
    # property computes it.
    return any(hasattr(type(hf), "mamba2_cache_params") for hf in hf_configs(config))


def has_index(config: Any) -> bool:
    return any(getattr(hf, "index_topk", None) is not None for hf in hf_configs(config))


def runs_on_transformers(config: Any) -> bool:
    chosen = getattr(config, "model_impl", None)
    is_on = str(getattr(chosen, "value", chosen)) == "transformers"
    return is_on and bool(getattr(config, "is_multimodal", False))
