"""``torch_native`` attention for speculative decoding, which SGLang's backend of that name lacks.

Three steps are missing there: the target verifies a chain of drafts (TARGET_VERIFY), the draft
model takes in what was accepted (DRAFT_EXTEND), and it writes one draft token after the other. In
all of them a query sees the keys up to its own position.
"""

from __future__ import annotations

from typing import Any  # Any: modules that are edited, and their objects

import torch


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    table: torch.Tensor,
    rows: torch.Tensor,
    lens: list[int],
    counts: list[int],
    scaling: float | None,
) -> torch.Tensor:
    """Attention of the last ``counts[i]`` tokens of requests that have ``lens[i]`` tokens with
    them.

    ``query``: [tokens, heads, dim], one request after the other; ``keys``, ``values``: the pool,
    [slots, KV heads, dim]; ``table``, ``rows``: where a request's slots stand. Returns
    [tokens, heads, dim of a value].
    """
    found, at = [], 0
    for row, length, count in zip(rows.tolist(), lens, counts, strict=True):
        slots = table[row, :length]
        queries = query[at : at + count].movedim(0, 1)
        visible = torch.ones(count, length, dtype=torch.bool).tril(length - count)
        out = torch.nn.functional.scaled_dot_product_attention(
            queries[None],
            keys[slots].movedim(0, 1)[None].to(query.dtype),
            values[slots].movedim(0, 1)[None].to(query.dtype),
            attn_mask=visible,
            scale=scaling,
            enable_gqa=query.shape[1] != keys.shape[1],
        )
        found.append(out[0].movedim(0, 1))
        at += count
    return torch.cat(found)


def _lengths(batch: Any) -> tuple[list[int], list[int]]:
    """Tokens of each request, and how many of them are queries. ``batch``: a ``ForwardBatch``."""
    lens = batch.seq_lens.tolist()
    if batch.forward_mode.is_target_verify():
        drafts = batch.spec_info.draft_token_num
        return [length + drafts for length in lens], [drafts] * len(lens)
    # ``extend_prefix_lens`` is what prefill left there.
    return lens, batch.extend_seq_lens.tolist()


def attend_drafts(module: Any) -> None:
    """After ``torch_native_backend``: verification, and the draft model's extension."""
    stock = module.TorchNativeAttnBackend.forward_extend

    def forward_extend(
        self: Any,
        q: Any,
        k: Any,
        v: Any,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
    ) -> Any:
        mode = forward_batch.forward_mode
        if not mode.is_target_verify() and mode.name != "DRAFT_EXTEND":
            return stock(self, q, k, v, layer, forward_batch, save_kv_cache)
        # On SGLang 0.5.23 the pools are the backend's, and a place is an object.
        pools = forward_batch if hasattr(forward_batch, "token_to_kv_pool") else self
        pool, place = pools.token_to_kv_pool, getattr(module, "KVWriteLoc", lambda loc: loc)
        if save_kv_cache:
            pool.set_kv_buffer(layer, place(forward_batch.out_cache_loc), k, v)
        out = attend(
            q.view(-1, layer.tp_q_head_num, layer.qk_head_dim),
            pool.get_key_buffer(layer.layer_id),
            pool.get_value_buffer(layer.layer_id),
            pools.req_to_token_pool.req_to_token,
            forward_batch.req_pool_indices,
            *_lengths(forward_batch),
            layer.scaling,
        )
        return out.reshape(len(out), -1)

    module.TorchNativeAttnBackend.forward_extend = forward_extend


def draft_backends(module: Any) -> None:
    """After ``draft_utils``: the backends of the draft model's steps."""
    factory = module.DraftBackendFactory
    stock_decode, stock_extend = factory.create_decode_backend, factory.create_draft_extend_backend

    def decode(made: Any) -> Any:
        if not _is_torch_native(made):
            return stock_decode(made)
        steps = made.speculative_num_steps
        return None if steps == 1 else DraftSteps(made.draft_model_runner, steps)

    def extend(made: Any) -> Any:
        from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

        if not _is_torch_native(made):
            return stock_extend(made)
        return TorchNativeAttnBackend(made.draft_model_runner)

    factory.create_decode_backend, factory.create_draft_extend_backend = decode, extend


def _is_torch_native(made: Any) -> bool:
    """Whether the draft model has that attention; ``made``: a ``DraftBackendFactory``."""
    chosen = made.draft_attn_backend or made.draft_model_runner.server_args.attention_backend
    return bool(chosen == "torch_native")


class DraftSteps:
    """Attention of the draft model's decode steps: the first draft token comes without one."""

    def __init__(self, runner: Any, steps: int) -> None:
        from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

        class DraftStep(TorchNativeAttnBackend):
            """One step. The batch keeps the lengths from before the first of them."""

            def __init__(self, step: int) -> None:
                super().__init__(runner)
                self._ahead = step + 1

            def _run_sdpa_forward_decode(
                self,
                q: Any,
                o: Any,
                k: Any,
                v: Any,
                table: Any,
                rows: Any,
                lens: Any,
                *more: Any,
                **how: Any,
            ) -> Any:
                return super()._run_sdpa_forward_decode(
                    q, o, k, v, table, rows, lens + self._ahead, *more, **how
                )

        self.attn_backends = [DraftStep(step) for step in range(steps - 1)]

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Nothing to prepare."""
