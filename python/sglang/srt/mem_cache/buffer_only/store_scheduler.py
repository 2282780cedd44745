"""The scheduler over a store, on each kind of server: the weights that keys of the store name.

Servers without a store do not have this mixin (``when`` in ``patchset/table.py``).

Weights may come in many updates of some tensors each, all but the last of which leave the cache as
it is. The fingerprint, a second or so for a large model, is taken once after those: when the cache
is flushed. Until then keys are this server's alone.
"""

from __future__ import annotations

import gc
import logging
import time
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING, Any  # Any: requests and answers of SGLang's, passed through

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
        # With data parallel attention each rank flushes when it is idle, and not all at a time.
        # Memory that was released cannot be read.
        if not self.server_args.enable_dp_attention and "weights" not in self.offload_tags:
            self.name_keys()
        return flushed

    @override
    def maybe_sleep_on_idle(self) -> None:
        if self.tree_cache.buffer.busy:
            # A sleeping scheduler would not see that a copy or the store has ended; one that looks
            # all the time would keep their threads from the interpreter.
            time.sleep(NAP_S)
        else:
            super().maybe_sleep_on_idle()
            self.tree_cache.buffer.is_idle = True

    # ---- new weights ----

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

    def _named_anew(self, update: Callable[[Any], Any], recv_req: Any) -> Any:
        self._weights_changed = (
            True  # also after a failed update, which may have written some weights
        )
        answer = update(recv_req)
        if self._weights_changed and recv_req.flush_cache:
            self.name_keys()
        elif self._weights_changed:
            nonces = gathered(uuid.uuid4().hex, self.tp_cpu_group)
            self.tree_cache.buffer.hide(nonces[0])
        return answer
