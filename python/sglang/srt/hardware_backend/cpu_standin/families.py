"""Other attention and experts than those of small dense models, in torch.

MLA in its absorbed form; windows, attention sinks and SGLang's second pool for window layers; the
experts of gpt-oss.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def absorb_always(module: Any) -> None:
    """After ``attention_backend_handler``: MLA in its absorbed form, as keys and values are read
    from the pool also where no prefix is."""
    module.AttentionBackendRegistry.register("torch_native", module._dispatch_mla_subtype)


def torch_native_for_triton(module: Any) -> None:
    """After ``attention_registry``: some models refuse all but GPU backends by name."""
    module.ATTENTION_BACKENDS["triton"] = module.ATTENTION_BACKENDS["torch_native"]


def attention(module: Any) -> None:
    """After ``torch_native_backend``: windows, sinks, the pool of window layers, top-k (DSA)."""
    backend = module.TorchNativeAttnBackend
    stock_extend, stock_decode = backend.forward_extend, backend.forward_decode

    def general(
        self: Any,
        q: Any,
        k: Any,
        v: Any,
        layer: Any,
        batch: Any,
        save: bool,
        decode: bool,
        sinks: Any = None,
        topk_indices: Any = None,
    ) -> Any:
        pool = batch.token_to_kv_pool
        if save and k is not None:
            pool.set_kv_buffer(layer, batch.out_cache_loc, k, v)
        keys, values = pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)
        table = batch.req_to_token_pool.req_to_token
        in_window_pool = (
            getattr(pool, "layers_mapping", {}).get(layer.layer_id, (0, False))[1] is True
        )
        q_ = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        lens = batch.seq_lens.tolist()
        counts = [1] * len(lens) if decode else batch.extend_seq_lens.tolist()
        window = layer.sliding_window_size
        found, at = [], 0
        for row, length, count in zip(batch.req_pool_indices.tolist(), lens, counts):
            slots = table[row, :length].long()
            if in_window_pool:
                slots = pool.full_to_swa_index_mapping[slots]
            visible = torch.ones(count, length, dtype=torch.bool).tril(length - count)
            if window is not None and window > -1:
                visible &= torch.ones(count, length, dtype=torch.bool).triu(length - count - window)
            if topk_indices is not None:
                chosen = torch.zeros(count, length + 1, dtype=torch.bool)
                chosen.scatter_(1, topk_indices[at : at + count].long() % (length + 1), True)
                visible &= chosen[:, :length]
            found.append(
                _attend(
                    q_[at : at + count].float(),
                    _take(keys, slots),
                    _take(values, slots),
                    visible,
                    layer.scaling,
                    sinks,
                    layer.logit_cap,
                ).to(q.dtype)
            )
            at += count
        if at < q_.shape[0]:  # padding
            found.append(q_.new_zeros(q_.shape[0] - at, layer.tp_q_head_num, layer.v_head_dim))
        return torch.cat(found).reshape(q_.shape[0], -1)

    def special(layer: Any, batch: Any, more: dict[str, Any]) -> bool:
        if getattr(batch.token_to_kv_pool, "dtype", torch.float32).itemsize == 1:
            return True
        window = layer.sliding_window_size is not None and layer.sliding_window_size > -1
        return bool(
            window
            or layer.logit_cap
            or any(x is not None for x in more.values())
            or hasattr(batch.token_to_kv_pool, "layers_mapping")
        )

    def forward_extend(
        self: Any,
        q: Any,
        k: Any,
        v: Any,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **more: Any,
    ) -> Any:
        if special(layer, forward_batch, more):
            return general(self, q, k, v, layer, forward_batch, save_kv_cache, False, **more)
        return stock_extend(self, q, k, v, layer, forward_batch, save_kv_cache)

    def forward_decode(
        self: Any,
        q: Any,
        k: Any,
        v: Any,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **more: Any,
    ) -> Any:
        if special(layer, forward_batch, more):
            return general(self, q, k, v, layer, forward_batch, save_kv_cache, True, **more)
        return stock_decode(self, q, k, v, layer, forward_batch, save_kv_cache)

    backend.forward_extend, backend.forward_decode = forward_extend, forward_decode


def _take(buffer: Tensor, slots: Tensor) -> Tensor:
    """Rows of a pool in float32; torch cannot index fp8 on a CPU."""
    if buffer.element_size() > 1:
        return buffer[slots].float()
    return buffer.view(torch.uint8)[slots].view(buffer.dtype).float()


def _attend(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float, sinks: Tensor | None, cap: float
) -> Tensor:
    """[queries, heads, dim], [keys, KV heads, dim], [keys, KV heads, dim of a value]."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    if cap:
        scores = cap * torch.tanh(scores / cap)
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        scores = torch.cat(
            [scores, sinks.to(scores.dtype)[:, None, None].expand(-1, scores.shape[1], 1)], -1
        )
    weights = scores.softmax(-1)[..., : k.shape[0]]
    return torch.einsum("hqk,khd->qhd", weights, v)


def experts(module: Any) -> None:
    """After ``fused_moe_native``: biases, and gpt-oss' activation."""
    stock = module.moe_forward_native

    def moe_forward_native(
        layer: Any, x: Tensor, topk_output: Any, moe_runner_config: Any
    ) -> Tensor:
        alpha, limit = moe_runner_config.gemm1_alpha, moe_runner_config.gemm1_clamp_limit
        biases = [getattr(layer, f"w{name}_weight_bias", None) for name in ("13", "2")]
        if alpha is None and biases[0] is None and layer.moe_ep_size == 1:
            return stock(layer, x, topk_output, moe_runner_config)
        weights, ids, _ = topk_output
        out = torch.zeros_like(x)
        for e in range(layer.w13_weight.shape[0]):
            token, place = (ids == e).nonzero(as_tuple=True)
            if len(token) == 0:
                continue
            h = x[token] @ layer.w13_weight[e].T
            h = h if biases[0] is None else h + biases[0][e].to(x.dtype)
            if alpha is None:
                gate, up = h.chunk(2, -1)
                h = torch.nn.functional.silu(gate) * up
            else:
                gate, up = h[..., ::2].clamp(max=limit), h[..., 1::2].clamp(-limit, limit)
                h = gate * torch.sigmoid(gate * alpha) * (up + 1)
            y = h @ layer.w2_weight[e].T
            y = y if biases[1] is None else y + biases[1][e].to(x.dtype)
            out.index_add_(0, token, y * weights[token, place, None].to(x.dtype))
        return out

    module.moe_forward_native = moe_forward_native


def no_triton(module: Any) -> None:
    """After ``utils.common``: whatever the name of the attention backend."""
    module.support_triton = lambda backend: False


def minimax_norms(module: Any) -> None:
    """After ``minimax_m2``: the sums of squares that its q and k norms share between ranks."""

    def sums(x1: Tensor, x2: Tensor) -> Tensor:
        return torch.stack([x.float().pow(2).sum(-1) for x in (x1, x2)])

    def apply(
        x1: Tensor,
        x2: Tensor,
        w1: Tensor,
        w2: Tensor,
        sum_sq: Tensor,
        t1: int = 1,
        t2: int = 1,
        eps: float = 1e-6,
    ) -> tuple[Tensor, ...]:
        return tuple(
            (x.float() * torch.rsqrt(s[:, None] / (x.shape[-1] * t) + eps) * w).to(x.dtype)
            for x, w, s, t in ((x1, w1, sum_sq[0], t1), (x2, w2, sum_sq[1], t2))
        )

    module.rms_sumsq_serial, module.rms_apply_serial = sums, apply


def gated_delta_net(module: Any) -> None:
    """After ``gdn_backend``: the convolution and the recurrence of linear attention, a token at a time."""
    act = torch.nn.functional.silu

    def conv(
        x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None, activation: Any
    ) -> tuple[Tensor, Tensor]:
        """[dim, tokens] behind ``state`` [dim, width - 1]."""
        whole = torch.cat([state.to(x.dtype), x], -1)
        out = torch.nn.functional.conv1d(whole[None], weight[:, None], bias, groups=x.shape[0])[0]
        return (act(out) if activation else out), whole[:, -state.shape[-1] :]

    def causal_conv1d_fn(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        conv_states: Tensor,
        query_start_loc: Tensor,
        seq_lens_cpu: Any,
        cache_indices: Tensor,
        has_initial_state: Tensor,
        activation: Any = "silu",
        **_: Any,
    ) -> Tensor:
        out, bounds = torch.empty_like(x), query_start_loc.tolist()
        for i, slot in enumerate(cache_indices.tolist()):
            part = slice(bounds[i], bounds[i + 1])
            start = (
                conv_states[slot] if has_initial_state[i] else torch.zeros_like(conv_states[slot])
            )
            out[:, part], conv_states[slot] = conv(x[:, part], start, weight, bias, activation)
        return out

    def causal_conv1d_update(
        x: Tensor,
        conv_states: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        activation: Any,
        conv_state_indices: Tensor,
        **_: Any,
    ) -> Tensor:
        out = torch.empty_like(x)
        for i, slot in enumerate(conv_state_indices.tolist()):
            if slot >= 0:
                row, conv_states[slot] = conv(
                    x[i][:, None], conv_states[slot], weight, bias, activation
                )
                out[i] = row[:, 0]
        return out

    def recur(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        states: Tensor,
        slots: Tensor,
        bounds: list[int],
    ) -> Tensor:
        """q, k: [tokens, heads, dim]; v: [tokens, value heads, dim]; states: [slots, value heads, V, K]."""
        groups, out = v.shape[1] // q.shape[1], torch.empty_like(v)
        q, k = (
            torch.nn.functional.normalize(x.float(), dim=-1, eps=1e-6).repeat_interleave(groups, 1)
            for x in (q, k)
        )
        q = q * q.shape[-1] ** -0.5
        for i, slot in enumerate(slots.tolist()):
            if slot < 0:
                continue
            state = states[slot].float()
            for t in range(bounds[i], bounds[i + 1]):
                state = state * g[t].exp()[:, None, None]
                new = (v[t].float() - torch.einsum("hvk,hk->hv", state, k[t])) * beta[t][:, None]
                state = state + new[:, :, None] * k[t][:, None, :]
                out[t] = torch.einsum("hvk,hk->hv", state, q[t]).to(out.dtype)
            states[slot] = state.to(states.dtype)
        return out[None]

    def gating(A_log: Tensor, a: Tensor, b: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
        g = -A_log.float().exp() * torch.nn.functional.softplus(a.float() + dt_bias)
        return g[None], b.float().sigmoid()[None]

    class TorchGDNKernel:
        supports_packed_decode = False

        def decode(
            self,
            q: Any,
            k: Any,
            v: Any,
            a: Any,
            b: Any,
            *,
            A_log: Any,
            dt_bias: Any,
            ssm_states: Any,
            cache_indices: Any,
            query_start_loc: Any,
            **_: Any,
        ) -> Any:
            g, beta = gating(A_log, a, b, dt_bias)
            return recur(
                q[0], k[0], v[0], g[0], beta[0], ssm_states, cache_indices, query_start_loc.tolist()
            )

        def extend(
            self,
            q: Any,
            k: Any,
            v: Any,
            g: Any,
            beta: Any,
            *,
            ssm_states: Any,
            cache_indices: Any,
            query_start_loc: Any,
            **_: Any,
        ) -> Any:
            return (
                recur(
                    q[0],
                    k[0],
                    v[0],
                    g[0],
                    beta[0],
                    ssm_states,
                    cache_indices,
                    query_start_loc.tolist(),
                ),
                None,
                None,
            )

    module.causal_conv1d_fn, module.causal_conv1d_update = causal_conv1d_fn, causal_conv1d_update
    module.fused_gdn_gating, module.TritonGDNKernel = gating, TorchGDNKernel


def gated_norm(module: Any) -> None:
    """After ``fla.layernorm_gated``."""

    def forward(self: Any, x: Tensor, z: Tensor | None = None) -> Tensor:
        if z is not None and not self.norm_before_gate:
            x = x * torch.nn.functional.silu(z)
        y = (
            x.float()
            * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
            * self.weight
        )
        if z is not None and self.norm_before_gate:
            y = y * torch.nn.functional.silu(z.float())
        return y.to(x.dtype)

    module.RMSNorm.forward = forward


def fused_gated_norm(module: Any) -> None:
    """After ``fla.fused_norm_gate``."""

    def forward(self: Any, x: Tensor, g: Tensor, *args: Any, **how: Any) -> Tensor:
        y = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
        if self.weight is not None:
            y = y * self.weight
        gate = (
            g.float().sigmoid()
            if self.activation == "sigmoid"
            else torch.nn.functional.silu(g.float())
        )
        return (y * gate).to(x.dtype)

    module.FusedRMSNormGated.forward = forward


def dsa_arguments(module: Any) -> None:
    """After ``server_args``: what DSA's defaults ask of a device."""
    module.ServerArgs._set_default_nsa_kv_cache_dtype = lambda self, major, quantization: None
    module.ServerArgs._set_default_nsa_backends = lambda self, dtype, major: None
    torch.cuda.get_device_capability = lambda device=None: (9, 0)


def dsa_indexer(module: Any) -> None:
    """After ``nsa_indexer``: keys of the index as fp8 with a scale a token, logits and choice in torch.
    Returns positions in each request's text; -1 for none."""

    def forward(
        self: Any,
        x: Tensor,
        q_lora: Tensor,
        positions: Tensor,
        forward_batch: Any,
        layer_id: int,
        return_indices: bool = True,
    ) -> Any:
        pool, batch, dim = forward_batch.token_to_kv_pool, forward_batch, self.head_dim
        buffer, page = pool.get_index_k_with_scale_buffer(layer_id), pool.page_size
        bytes_, rope = page * dim, self.rope_head_dim
        q = self.wq_b(q_lora)[0].view(-1, self.n_heads, dim)
        k = self.k_norm(self.wk(x)[0])
        q_rope, k_rope = self.rotary_emb(
            positions, q[..., :rope].contiguous(), k[:, None, :rope].contiguous()
        )
        q, k = (
            torch.cat([q_rope.reshape(-1, self.n_heads, rope), q[..., rope:]], -1),
            torch.cat([k_rope.reshape(-1, rope), k[:, rope:]], -1),
        )
        fp8 = buffer[:, :bytes_].view(torch.float8_e4m3fn).view(-1, page, dim)
        scales = buffer[:, bytes_:].view(torch.float32)
        loc = batch.out_cache_loc.long()
        if len(loc):
            scale = k.float().abs().amax(-1).clamp(min=1e-4) / 448.0
            fp8.view(torch.uint8)[loc // page, loc % page] = (
                (k.float() / scale[:, None]).to(torch.float8_e4m3fn).view(torch.uint8)
            )
            scales[loc // page, loc % page] = scale
        if not return_indices:
            return None
        weights = self.weights_proj(x.float())[0].float() * self.n_heads**-0.5 * self.softmax_scale
        decode = batch.forward_mode.is_decode_or_idle()
        lens = batch.seq_lens.tolist()
        counts = [1] * len(lens) if decode else batch.extend_seq_lens.tolist()
        out, at = torch.full((x.shape[0], self.index_topk), -1, dtype=torch.int32), 0
        for row, length, count in zip(batch.req_pool_indices.tolist(), lens, counts):
            slots = batch.req_to_token_pool.req_to_token[row, :length].long()
            keys = (
                fp8.view(torch.uint8)[slots // page, slots % page].view(torch.float8_e4m3fn).float()
                * scales[slots // page, slots % page, None]
            )
            logits = torch.einsum(
                "qhk,qh->qk",
                torch.einsum("qhd,kd->qhk", q[at : at + count].float(), keys).relu(),
                weights[at : at + count],
            )
            logits = logits.masked_fill(
                ~torch.ones(count, length, dtype=torch.bool).tril(length - count), float("-inf")
            )
            top = logits.topk(min(self.index_topk, length), -1)
            out[at : at + count, : top.indices.shape[1]] = top.indices.int().masked_fill(
                top.values == float("-inf"), -1
            )
            at += count
        return out

    module.Indexer.forward = forward


def experts_on_cpu(module: Any) -> None:
    """After ``token_dispatcher.standard``: expert parallelism maps experts on the device."""
    module.get_device = lambda: "cpu"
