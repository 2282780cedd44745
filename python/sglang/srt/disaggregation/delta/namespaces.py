"""Keeps requests of different namespaces (``extra_key``, ``cache_salt``) apart.

A base of the schedulers of decode with the radix cache and of ``buffer_only``.

Contract: the scheduler's thread only, which builds one ``Req`` at a time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from typing_extensions import override

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.scheduler import Scheduler
else:
    Scheduler = object


class NamespacedScheduler(Scheduler):
    """Restores the namespace of a request (``extra_key``, ``cache_salt``), which this release reads
    and then drops when it builds its Req. Needed for a tree or a store that outlives requests."""

    _namespace: str | None = None

    @override
    def handle_generate_request(self, recv_req: TokenizedGenerateReqInput) -> None:
        self._namespace = recv_req.extra_key
        try:
            super().handle_generate_request(recv_req)
        finally:
            self._namespace = None

    @override
    def init_req_max_new_tokens(self, req: Req) -> None:
        super().init_req_max_new_tokens(req)  # the first call for every new Req
        if self._namespace:
            # SGLang's /generate also passes a list of texts.
            req.extra_key = f"{self._namespace}{req.lora_id or ''}"
