"""Runs a model on SGLang in this process, without a server."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from sglang import bench_one_batch
from sglang.srt.layers.moe import initialize_moe_config
from sglang.srt.server_args import PortArgs, prepare_server_args


class InProcess:
    """A loaded model. One per process, because SGLang sets up its process groups once."""

    def __init__(self, folder: Path, *args: str) -> None:
        torch.set_num_threads(1)
        server_args = prepare_server_args(
            [
                *("--model-path", str(folder), "--device", "cpu", "--dtype", "float32"),
                *("--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
                *("--disable-cuda-graph", "--disable-piecewise-cuda-graph"),
                *("--max-total-tokens", "4096", "--mem-fraction-static", "0.2"),
                *("--max-running-requests", "4", *args),
            ]
        )
        initialize_moe_config(server_args)
        loaded, _ = bench_one_batch.load_model(server_args, PortArgs.init_new(server_args), 0, 0)
        self.runner = loaded.torch_runner

    def answer(self, text: Sequence[int], tokens: int) -> tuple[list[int], torch.Tensor]:
        """Return the greedy answer, ``tokens`` long, and the logits of each token."""
        self.runner.req_to_token_pool.clear()
        self.runner.token_to_kv_pool_allocator.clear()
        requests = bench_one_batch.prepare_synthetic_inputs_for_latency_test(1, 0, [list(text)])
        ids, logits, batch = bench_one_batch.extend(requests, self.runner)
        answer, all_logits = [*ids.tolist()], [logits]
        while len(answer) < tokens:
            ids, logits = bench_one_batch.decode(ids, batch, self.runner)
            answer += ids.tolist()
            all_logits.append(logits)
        return answer, torch.cat(all_logits)
