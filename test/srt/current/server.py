"""One rank of a real server of SGLang 0.5.23: its ``Scheduler``, model, pools and tree.

Requests come from the test instead of a socket, and outputs to clients are recorded.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any  # Any: objects of SGLang

from current.loop import Loop
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers import scheduler as scheduler_module
from sglang.srt.managers.io_struct import AbortReq, TokenizedGenerateReqInput
from sglang.srt.runtime_context import SpawnRanks, publish
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import PortArgs, prepare_server_args

PAGE = 16
#: Arguments of every server: the model is small, and there is no GPU.
ARGUMENTS = (
    *("--device", "cpu", "--dtype", "float32", "--attention-backend", "torch_native"),
    *("--sampling-backend", "pytorch", "--page-size", str(PAGE), "--chunked-prefill-size", "1024"),
    *("--max-running-requests", "16", "--random-seed", "1", "--skip-server-warmup"),
)
#: Address of the prefill server.
HOST = "127.0.0.1"
PORT = 8998


class Stepped(scheduler_module.Scheduler):
    """SGLang's scheduler, which pauses at the top of each iteration of its loop."""

    stepping: Loop | None = None

    @property
    def gracefully_exit(self) -> bool:
        """Pause the loop, which reads this first in each iteration."""
        return self.stepping is not None and self.stepping.is_here() and self.stepping.pause()

    @gracefully_exit.setter
    def gracefully_exit(self, value: bool) -> None:
        assert not value


class Server:
    """A scheduler with its loop; ``mode`` is a value of ``--disaggregation-mode``."""

    def __init__(self, model: str, mode: str, *arguments: str, tokens: int = 8000) -> None:
        """``tokens``: size of the KV pool. ``arguments``: more arguments of the command line."""
        command_line = ["--model-path", model, "--max-total-tokens", str(tokens), *ARGUMENTS]
        if mode != "null":
            command_line += [
                "--disaggregation-mode",
                mode,
                "--disaggregation-transfer-backend",
                "nixl",
            ]
        if mode == "decode":
            command_line.append("--disaggregation-decode-enable-radix-cache")
        self.loop = Loop()
        self.inbox: list[Any] = []
        #: Outputs to clients, oldest first.
        self.outputs: list[Any] = []
        #: SGLang's requests by id.
        self.requests: dict[str, Any] = {}
        self._numbers = itertools.count(1)
        self.scheduler: Any = self.loop.call(lambda: self._make([*command_line, *arguments]))
        self.mode = self.scheduler.disaggregation_mode
        self.loop.begin(self.scheduler.run_event_loop)

    def _make(self, arguments: list[str]) -> Any:
        args = prepare_server_args(arguments)
        args.resolve_once()
        args.check_server_args()
        # The first of several servers, if they are data parallel.
        ranks = SpawnRanks(world_rank=0, dp_rank=0 if args.dp_size > 1 else None, gpu_id=0)
        publish(args, role="scheduler", ranks=ranks)
        scheduler = Stepped(args, PortArgs.init_new(args))
        scheduler.stepping = self.loop
        scheduler.request_receiver = SimpleNamespace(recv_requests=self._receive)
        for channel in (
            scheduler.ipc_channels.send_to_tokenizer,
            scheduler.ipc_channels.send_to_detokenizer,
        ):
            channel.send_output = lambda output, request=None: self.outputs.append(output)
        enqueue = scheduler._add_request_to_queue

        def note(req: Any, *args: Any, **kwargs: Any) -> None:
            self.requests[req.rid] = req
            enqueue(req, *args, **kwargs)

        scheduler._add_request_to_queue = note
        return scheduler

    def _receive(self, local_reqs: list[Any] | None = None) -> list[Any]:
        received, self.inbox = self.inbox, []
        return [*received, *(local_reqs or ())]

    # Actions of a test

    def ask(self, prompt: Sequence[int], new: int, **more: Any) -> str:
        """Send a request for ``new`` tokens after ``prompt``; return its id.

        The scheduler receives it in the next step. ``more``: further fields of
        ``TokenizedGenerateReqInput``.
        """
        number = next(self._numbers)
        params = SamplingParams(
            max_new_tokens=new, temperature=0, ignore_eos=True, **more.pop("sampling", {})
        )
        params.normalize(None)
        fields = {
            "bootstrap_host": HOST,
            "bootstrap_port": PORT,
            "bootstrap_room": number,
            "rid": f"r{number}",
            "return_logprob": False,
            "logprob_start_len": -1,
            "top_logprobs_num": 0,
            "stream": False,
        } | more
        self.inbox.append(
            TokenizedGenerateReqInput(
                input_text="",
                input_ids=array("q", prompt),
                input_embeds=None,
                mm_inputs=None,
                token_type_ids=None,
                sampling_params=params,
                token_ids_logprob=None,
                **fields,
            )
        )
        return fields["rid"]

    def abort(self, rid: str) -> None:
        """Disconnect the client of ``rid``; the scheduler aborts the request in the next step."""
        self.inbox.append(AbortReq(rid=rid))

    def step(self, times: int = 1) -> None:
        """Run iterations of SGLang's loop."""
        for _ in range(times):
            self.loop.step()

    def until(self, reached: Callable[[], bool], limit: int = 400) -> int:
        """Step until ``reached``; return the number of steps. Fail after ``limit``."""
        for steps in range(limit):
            if reached():
                return steps
            self.step()
        raise AssertionError(f"not reached in {limit} steps: {self.state()}")

    def call(self, function: Callable[[], Any]) -> Any:
        """Run a function between two steps, on the scheduler's thread."""
        return self.loop.call(function)

    def ended(self, *rids: str) -> bool:
        """Return True if these requests (by default all) have ended."""
        return all(self.requests[rid].finished() for rid in rids or list(self.requests))

    def output(self, rid: str) -> list[int]:
        """Return the tokens of ``rid`` so far, without surplus tokens of a speculative step."""
        req = self.requests[rid]
        return list(req.output_ids[: req.finished_len or req.sampling_params.max_new_tokens])

    # Balance

    def in_mode(self, mode: DisaggregationMode) -> None:
        """Continue in the loop of another mode; the server must be idle."""
        assert self.is_idle(), self.state()
        self.loop.end()
        self.scheduler.disaggregation_mode = mode
        self.loop.begin(self.scheduler.run_event_loop)

    def flush(self) -> None:
        """Empty the tree."""
        assert self.call(self.scheduler.flush_cache), self.state()

    def is_idle(self) -> bool:
        """Return True if SGLang is idle, without a step of the overlap loop in flight."""
        return bool(self.call(self.scheduler.is_fully_idle)) and not self.inbox

    def balance(self) -> dict[str, int]:
        """Return the tokens that are free or evictable, the locked ones, free rows and free
        metadata slots: equal before and after every test."""
        scheduler, tree = self.scheduler, self.scheduler.tree_cache
        allocator = scheduler.token_to_kv_pool_allocator
        counts = {
            "tokens": allocator.available_size() + tree.evictable_size(),
            "locked": tree.protected_size(),
            "rows": scheduler.req_to_token_pool.available_size(),
        }
        if tree.supports_swa():
            counts["tokens"] = allocator.full_available_size() + tree.full_evictable_size()
            counts["windows"] = allocator.swa_available_size() + tree.swa_evictable_size()
            counts["locked windows"] = tree.swa_protected_size()
        if tree.supports_mamba():
            states = scheduler.req_to_token_pool.mamba_allocator.available_size()
            counts["states"] = states + tree.mamba_evictable_size()
            counts["locked states"] = tree.mamba_protected_size()
        if self.mode is not DisaggregationMode.NULL:
            counts["metadata"] = scheduler.req_to_metadata_buffer_idx_allocator.available_size()
        return counts

    def state(self) -> str:
        """Return the server's state for messages of failed tests."""
        scheduler = self.scheduler
        queues = {
            name: len(getattr(getattr(scheduler, name, None), "queue", ()))
            for name in ("disagg_decode_prealloc_queue", "disagg_decode_transfer_queue")
        }
        running = [req.rid for req in scheduler.running_batch.reqs]
        return (
            f"running {running}, waiting {len(scheduler.waiting_queue)}, {queues}, {self.balance()}"
        )
