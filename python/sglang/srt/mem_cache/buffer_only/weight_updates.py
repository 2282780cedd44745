"""The scheduler's part of namespaces: keys of the store name the weights, also after an update.

Weights may come in many updates of some tensors each, all but the last of which leave the cache as
it is. The fingerprint, a second or so for a large model, is taken once after those: when the cache
is flushed. Until then keys are this server's alone.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING, Any  # Any: SGLang's control requests and answers, handed on

from typing_extensions import override

from sglang.srt.disaggregation.delta.rank_agreement import gathered
from sglang.srt.mem_cache.buffer_only.namespaces import Namespace, fingerprint, model_identity

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler
else:
    Scheduler = object

logger = logging.getLogger(__name__)


class NamingScheduler(Scheduler):
    """Base of ``scheduler.BufferOnlyScheduler``."""

    #: Whether the weights in memory may be others than those that the keys name.
    _weights_changed: bool = False

    def name_keys(self) -> None:
        """Name the keys by the weights that are in memory now; on all ranks at the same time."""
        start = time.monotonic()
        runner, tree = self.tp_worker.model_runner, self.tree_cache
        config = self.model_config.hf_config.to_dict()
        # All ranks of the server: with data parallel attention, one of its groups alone does not
        # hold all experts.
        ranks = gathered((fingerprint(runner.model), uuid.uuid4().hex), self.tp_cpu_group)
        model = model_identity(config, (weights for weights, _ in ranks))
        pool = tree.pool_identity()
        self._weights_changed = False
        tree.buffer.use(Namespace.of({"model": model, "pool": pool}), nonce=ranks[0][1])
        logger.info(
            "HiCache keys are those of weights %s, configuration %s and pages %s (found in %.1f s; "
            "servers read each other's pages where all three are equal): namespace %s",
            Namespace.of({"weights": model["weights"]}),
            model["config"][:12],
            Namespace.of(pool),
            time.monotonic() - start,
            tree.buffer.context.store.namespace,
        )

    @override
    def update_weights_from_disk(self, recv_req: Any) -> Any:
        return self._named_anew(super().update_weights_from_disk, recv_req)

    @override
    def update_weights_from_distributed(self, recv_req: Any) -> Any:
        return self._named_anew(super().update_weights_from_distributed, recv_req)

    @override
    def update_weights_from_tensor(self, recv_req: Any) -> Any:
        return self._named_anew(super().update_weights_from_tensor, recv_req)

    @override
    def update_weights_from_ipc(self, recv_req: Any) -> Any:
        return self._named_anew(super().update_weights_from_ipc, recv_req)

    @override
    def flush_cache(self) -> Any:
        flushed = super().flush_cache()
        if not flushed or not self._weights_changed:
            return flushed
        # With data parallel attention each rank flushes when it is idle, and not all at a time.
        # Memory that was released cannot be read.
        if not self.server_args.enable_dp_attention and "weights" not in self.offload_tags:
            self.name_keys()
        return flushed

    def _named_anew(self, update: Callable[[Any], Any], recv_req: Any) -> Any:
        self._weights_changed = True  # also by one that fails: it may have written some of them
        answer = update(recv_req)
        if self._weights_changed and recv_req.flush_cache:
            self.name_keys()
        elif self._weights_changed:
            nonces = gathered(uuid.uuid4().hex, self.tp_cpu_group)
            self.tree_cache.buffer.hide(nonces[0])
        return answer
