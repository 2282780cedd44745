"""Scheduler mixin of every server with a store: keeps the keys in step with the weights.

Weights may arrive in many updates of a few tensors, of which only the last flushes the cache. So
the fingerprint, about a second for a large model, is computed once, at that flush. Until then the
keys are private to this server.

Contract: scheduler thread. ``name_keys`` and weight updates contain collectives over all ranks of
the server, so that every rank must reach them in the same step. Only servers with a store have this
mixin (``when`` in ``patchset/table.py``).
"""

from __future__ import annotations

import gc
import logging
import time
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING, Any  # Any: SGLang's requests and answers, passed through

from typing_extensions import override

from sglang.srt.disaggregation.delta.rank_agreement import gathered
from sglang.srt.mem_cache.buffer_only.namespaces import Namespace, fingerprint, model_identity
from sglang.srt.mem_cache.buffer_only.nodes import image_key

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.scheduler import Scheduler
else:
    Scheduler = object

logger = logging.getLogger(__name__)

#: Seconds to sleep between two steps without a batch while store traffic is under way.
NAP_S = 0.0005


class StoreScheduler(Scheduler):
    """Names the keys, and stays awake while store traffic is under way."""

    #: True if all ranks flush in the same step, also for a flush with a timeout.
    names_keys_at_flush: bool = True
    #: True if the weights may differ from those that the keys name.
    _weights_changed: bool = False

    @override
    def run_event_loop(self) -> None:
        # Set here, because SGLang creates the stream after the cache. Copies wait for this stream.
        self.tree_cache.forward_stream = getattr(self, "forward_stream", None)
        # Python's first full collection would scan every object from startup and stall all
        # requests.
        gc.collect()
        gc.freeze()
        super().run_event_loop()

    @override
    def _add_request_to_queue(self, req: Req, is_retracted: bool = False) -> None:
        if self.model_config.is_multimodal:  # before the first tree match
            req.extra_key = image_key(req)
        super()._add_request_to_queue(req, is_retracted)

    @override
    def flush_cache(self) -> Any:
        flushed = super().flush_cache()
        if not (flushed and self._weights_changed and self.names_keys_at_flush):
            return flushed
        # Not with data parallel attention, because its ranks flush at different times, and not
        # while the weights' memory is released, because it cannot be read.
        if not self.server_args.enable_dp_attention and "weights" not in self.offload_tags:
            self.name_keys()
        return flushed

    @override
    def maybe_sleep_on_idle(self) -> None:
        if self.tree_cache.buffer.busy:
            # Nap only, because a sleeping scheduler would not see that a copy or a store call has
            # ended, and a busy one would keep their threads from the interpreter.
            time.sleep(NAP_S)
        else:
            super().maybe_sleep_on_idle()
            self.tree_cache.buffer.is_idle = True

    # ---- new weights ----

    def name_keys(self) -> None:
        """Derive the keys from the weights in memory. Called on all ranks in the same step."""
        start = time.monotonic()
        runner, tree = self.tp_worker.model_runner, self.tree_cache
        config = self.model_config.hf_config.to_dict()
        # Over all ranks of the server, because one data parallel attention group does not hold all
        # experts.
        ranks = gathered((fingerprint(runner.model), uuid.uuid4().hex), self.tp_cpu_group)
        model = model_identity(config, (weights for weights, _ in ranks))
        pool = tree.pool_identity()
        self._weights_changed = False
        tree.buffer.use(Namespace.of({"model": model, "pool": pool}), nonce=ranks[0][1])
        logger.info(
            "HiCache keys are those of weights %s, configuration %s and pages %s (computed in "
            "%.1f s; servers share pages if all three are equal): namespace %s",
            Namespace.of({"weights": model["weights"]}),
            model["config"][:12],
            Namespace.of(pool),
            time.monotonic() - start,
            tree.buffer.context.store.namespace,
        )

    @override
    def update_weights_from_disk(self, recv_req: Any) -> Any:
        return self._update_and_rename(super().update_weights_from_disk, recv_req)

    @override
    def update_weights_from_distributed(self, recv_req: Any) -> Any:
        return self._update_and_rename(super().update_weights_from_distributed, recv_req)

    @override
    def update_weights_from_tensor(self, recv_req: Any) -> Any:
        return self._update_and_rename(super().update_weights_from_tensor, recv_req)

    @override
    def update_weights_from_ipc(self, recv_req: Any) -> Any:
        return self._update_and_rename(super().update_weights_from_ipc, recv_req)

    def _update_and_rename(self, update: Callable[[Any], Any], recv_req: Any) -> Any:
        # Also after a failed update, because it may have written some weights.
        self._weights_changed = True
        answer = update(recv_req)
        if self._weights_changed and recv_req.flush_cache:
            self.name_keys()
        elif self._weights_changed:
            nonces = gathered(uuid.uuid4().hex, self.tp_cpu_group)
            self.tree_cache.buffer.hide(nonces[0])
        return answer
