"""Memory layout of KV, state and metadata on this rank and on a decode rank, as pairs of pools."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any  # Any: lists of addresses from SGLang

from sglang.srt.disaggregation.delta import pages as heads
from sglang.srt.disaggregation.delta.metrics import Reason
from sglang.srt.disaggregation.delta.nixl.descriptors import Heads, Pool, check_pair
from sglang.srt.disaggregation.delta.prefill.transfer_backend import TransferError

if TYPE_CHECKING:
    from sglang.srt.disaggregation.base.conn import KVArgs
    from sglang.srt.disaggregation.delta.rank import RankView
    from sglang.srt.disaggregation.nixl.conn import KVArgsRegisterInfo

#: Number of slots of a pool whose owner did not announce it. Accepts every index and is too large
#: for a prepared list; NIXL itself refuses addresses outside the peer's registered memory.
UNKNOWN_SLOTS = 2**31

#: Kinds of state that are stored in pages, like KV.
PAGED_STATE = ("swa", heads.INDEX_TYPE)


@dataclass(frozen=True)
class Pair:
    """The same buffers on both sides, in the same order."""

    source: Pool
    destination: Pool

    def __post_init__(self) -> None:
        check_pair(self.source, self.destination)


class Layout:
    """Computes pairs of pools from this rank's ``KVArgs`` and a decode rank's registration.
    Stateless, so that any thread may use it."""

    def __init__(
        self,
        rank: RankView,
        latent_buffers: Callable[[Sequence[int], Sequence[int]], Any],
        kv_buffers: Callable[[Sequence[int], Sequence[int]], Any],
    ) -> None:
        """``latent_buffers``, ``kv_buffers``: SGLang's ``get_mla_kv_ptrs_with_pp`` and
        ``get_mha_kv_ptrs_with_pp``."""
        self._rank = rank
        self._latent_buffers = latent_buffers
        self._kv_buffers = kv_buffers
        #: This rank's memory.
        self.ours: KVArgs = rank.kv_args

    def kv(self, info: KVArgsRegisterInfo, slots: int | None) -> Pair:
        """Return the KV pools, of whole pages or of some heads of every token; without buffers if
        this rank sends nothing. ``slots``: pages of the decode rank's pool, if announced.

        Raises:
            TransferError: the pools do not fit.
        """
        rank, ours = self._rank, self.ours
        if not rank.is_mla and info.decode_tp_size != rank.tp_size:
            return self._heads(info, slots)
        source, destination = self._buffers(ours.kv_data_ptrs, info.dst_kv_ptrs)
        return self._pair(
            source,
            destination,
            ours.kv_item_lens,
            ours.kv_data_lens[0] // ours.kv_item_lens[0],
            slots,
            info.gpu_id,
        )

    def metadata(self, info: KVArgsRegisterInfo, slots: int | None) -> Pair:
        """Return the metadata buffers, which are always in host memory."""
        ours = self.ours
        return self._pair(
            ours.aux_data_ptrs,
            info.dst_aux_ptrs,
            ours.aux_item_lens,
            ours.aux_data_lens[0] // ours.aux_item_lens[0],
            slots,
            None,
        )

    def state(self, info: KVArgsRegisterInfo) -> Pair:
        """Return the buffers of a hybrid model's state.

        Raises:
            TransferError: the kind of state or the tensor parallel sizes are not supported.
        """
        ours, kind = self.ours, getattr(self.ours, "state_type", "none")
        same_size = info.decode_tp_size == self._rank.tp_size
        if kind not in (*PAGED_STATE, heads.RECURRENT_TYPE):
            raise TransferError(Reason.MISMATCH, f"NIXL cannot transfer state of the kind {kind!r}")
        if not same_size and not (kind in PAGED_STATE and self._rank.is_mla):
            raise TransferError(
                Reason.MISMATCH,
                f"state of the kind {kind!r} needs equal tensor parallel sizes, not "
                f"{self._rank.tp_size} on prefill and {info.decode_tp_size} on decode",
            )
        source, destination = ours.state_data_ptrs, info.dst_state_data_ptrs
        if kind in PAGED_STATE:
            source, destination = self._buffers(source, destination)
        lens = ours.state_item_lens
        return self._pair(
            source, destination, lens, ours.state_data_lens[0] // lens[0], None, info.gpu_id
        )

    def _heads(self, info: KVArgsRegisterInfo, slots: int | None) -> Pair:
        """Return the heads of every token that this rank sends to a rank of a different tensor
        parallel size; without buffers if a replica sends them.

        Used instead of stock's function, which divides by zero with fewer KV heads than ranks, and
        cuts values by the length of keys.
        """
        ours = self.ours
        size, theirs = self._rank.tp_size, info.decode_tp_size
        total = getattr(ours, "total_kv_head_num", 0) or ours.kv_head_num * size
        try:
            plan = heads.plan_heads(
                ours.engine_rank % size, size, info.decode_tp_rank % theirs, theirs, total
            )
            if not plan.count:
                empty = Pool((), (), 1, 0)
                return Pair(empty, empty)
            page = ours.page_size
            lens = ours.kv_item_lens
            source, destination = self._buffers(ours.kv_data_ptrs, info.dst_kv_ptrs)
            pages = ours.kv_data_lens[0] // lens[0]
            # Scale our lengths, because decode announces only the length of its keys.
            their_lens = [info.dst_kv_item_len * item_len // lens[0] for item_len in lens]
            if plan.count == ours.kv_head_num and their_lens == list(lens):  # replicas of all heads
                return self._pair(source, destination, lens, pages, slots, info.gpu_id)
            head_lens = [item_len // page // ours.kv_head_num for item_len in lens]
            tokens = [
                heads.token_lens(
                    page=page,
                    source_item_len=item_len,
                    destination_item_len=their_len,
                    head_bytes=head_len,
                    plan=plan,
                )
                for item_len, their_len, head_len in zip(lens, their_lens, head_lens, strict=True)
            ]
            our_tokens, their_tokens = zip(*tokens, strict=True)
            our_heads = Heads(plan.source_start, plan.count, page, our_tokens)
            their_heads = Heads(plan.destination_start, plan.count, page, their_tokens)
            their_pages = slots or UNKNOWN_SLOTS
            return Pair(
                _pool_of(our_heads, source, head_lens, pages, ours.gpu_id),
                _pool_of(their_heads, destination, head_lens, their_pages, info.gpu_id),
            )
        except ValueError as error:
            raise TransferError(Reason.MISMATCH, str(error)) from error

    def _buffers(
        self, source: Sequence[int], destination: Sequence[int]
    ) -> tuple[list[int], list[int]]:
        """Return the addresses of this pipeline stage's buffers on both sides: keys of all layers,
        then values; or the latent buffers."""
        if self._rank.is_mla:
            ours, theirs, layers = self._latent_buffers(source, destination)
            return list(ours[:layers]), list(theirs[:layers])
        keys, values, their_keys, their_values, layers = self._kv_buffers(source, destination)
        return (
            [*keys[:layers], *values[:layers]],
            [*their_keys[:layers], *their_values[:layers]],
        )

    def _pair(
        self,
        source: Sequence[int],
        destination: Sequence[int],
        item_lens: Sequence[int],
        source_slots: int,
        destination_slots: int | None,
        their_device: int | None,
    ) -> Pair:
        lens = tuple(item_lens)
        in_host_memory = their_device is None
        try:
            return Pair(
                Pool(tuple(source), lens, source_slots, 0 if in_host_memory else self.ours.gpu_id),
                Pool(
                    tuple(destination), lens, destination_slots or UNKNOWN_SLOTS, their_device or 0
                ),
            )
        except ValueError as error:
            raise TransferError(Reason.MISMATCH, str(error)) from error


def _pool_of(
    heads_sent: Heads, bases: Sequence[int], head_lens: Sequence[int], pages: int, device: int
) -> Pool:
    """Return a pool of ``heads_sent`` of the tokens of ``pages`` pages; ``head_lens``: bytes of one
    head of one token, by buffer."""
    if len(bases) != len(head_lens):
        raise ValueError(f"{len(bases)} buffers and {len(head_lens)} lengths")
    return Pool(
        tuple(base + heads_sent.first * size for base, size in zip(bases, head_lens, strict=True)),
        tuple(heads_sent.count * size for size in head_lens),
        pages * heads_sent.page,
        device,
        heads_sent,
    )
