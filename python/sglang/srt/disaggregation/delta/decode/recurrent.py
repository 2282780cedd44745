"""Recurrent state on a decode server with the radix cache.

The tree covers the KV of full attention only: prefill sends the state at the end of each prompt, so
decode needs no state for a prefix. A request has one state slot, allocated and freed with its row.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any  # Any: attributes of pools with recurrent state

from typing_extensions import override

from sglang.srt.patchset import flags

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner_kv_cache_mixin import ModelRunnerKVCacheMixin
else:
    ModelRunnerKVCacheMixin = object

logger = logging.getLogger(__name__)


def serve_states(pool: Any, rows: Any) -> None:
    """Limit the rows of ``rows`` to the state slots, and let ``pool`` copy a retracted request's KV
    to the CPU."""
    # SGLang fails an assertion for a row without a state slot. With one row a slot, admission waits
    # for a row instead.
    rows.pre_alloc_size = rows.mamba_pool.size - rows.size
    rows.clear()
    # SGLang's pool cannot copy KV to the CPU, so the first retraction would terminate the server.
    # ``pages.copy_state`` copies the state.
    kv = pool.full_kv_pool
    pool.get_cpu_copy, pool.load_cpu_copy = kv.get_cpu_copy, kv.load_cpu_copy
    pool.cpu_offloading_chunk_size = kv.cpu_offloading_chunk_size
    logger.info(
        "recurrent state: at most %d requests in transfer or running, one state slot each "
        "(--max-mamba-cache-size)",
        rows.mamba_pool.size,
    )


class RequestStates(ModelRunnerKVCacheMixin):
    """Sizes the pool of recurrent states by requests alone, because decode's tree has no states."""

    @override
    def handle_max_mamba_cache(self, total_rest_memory: Any) -> Any:
        args = self.server_args
        if flags.wants_radix_cache(args) and args.max_mamba_cache_size is None:
            args.max_mamba_cache_size = args.max_running_requests
        return super().handle_max_mamba_cache(total_rest_memory)

    @override
    def _calculate_mamba_ratio(self) -> int:
        ratio: int = super()._calculate_mamba_ratio()
        return 1 if flags.wants_radix_cache(self.server_args) else ratio
