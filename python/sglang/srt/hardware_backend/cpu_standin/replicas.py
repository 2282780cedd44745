"""More ranks than KV heads: replicas of a head, as on GPUs.

For a CPU, SGLang pads the heads instead, and only its AMX weight loader can fill the padding.
"""

from __future__ import annotations

from typing import Any  # Any: modules that are edited, and their objects


def edit(model_runner: Any) -> None:
    """Pad only where GPUs could not lay out the heads either."""
    pad = model_runner.adjust_config_with_unaligned_cpu_tp

    def adjust(model_config: Any, load_config: Any, tp_size: int) -> Any:
        heads, kv_heads = model_config.num_attention_heads, model_config.get_total_num_kv_heads()
        if heads % tp_size == 0 and tp_size % kv_heads == 0:
            return model_config
        return pad(model_config, load_config, tp_size)

    model_runner.adjust_config_with_unaligned_cpu_tp = adjust
