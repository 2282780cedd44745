"""Which buffers of this rank go to which of a decode rank's."""

from __future__ import annotations

from typing import Any

import pytest

from sglang.srt.disaggregation.delta.metrics import Reason
from sglang.srt.disaggregation.delta.nixl.layout import UNKNOWN_SLOTS, Layout, Pair
from sglang.srt.disaggregation.delta.prefill.transfer_backend import TransferError
from unit.delta.nixl.sides import KEY_BYTES, METADATA, PAGE, STATE, VALUE_BYTES, Side, manager_of


class Scene:
    """A prefill rank, the layout that it sees, and a decode rank's registration."""

    def __init__(self, is_mla: bool = False, decode: Side | None = None) -> None:
        self.prefill = Side(2**63 - 5000, 12, is_mla=is_mla)
        self.decode = decode or Side(2**40, 17, is_mla=is_mla)
        self.manager = manager_of(self.prefill, is_mla)
        self.layout = Layout(self.manager)
        self.info = self.decode.info("d")


@pytest.mark.parametrize("slots", [17, None])
@pytest.mark.parametrize("is_mla", [False, True])
def test_kv(is_mla: bool, slots: int | None) -> None:
    """Guards against our number of slots or our device taken for the peer's, and keys taken for
    values."""
    scene = Scene(is_mla)
    pair = scene.layout.kv(scene.info, slots)
    token = 1 if is_mla else 2
    lens = [PAGE * token * KEY_BYTES] * 2 + ([] if is_mla else [PAGE * token * VALUE_BYTES] * 2)
    for pool, side, count in (
        (pair.source, scene.prefill, 12),
        (pair.destination, scene.decode, slots or UNKNOWN_SLOTS),
    ):
        assert list(pool.bases) == side.args.kv_data_ptrs
        assert (list(pool.item_lens), pool.slots, pool.device) == (lens, count, 1)
    scene.info.gpu_id = 6
    assert scene.layout.kv(scene.info, slots).destination.device == 6


@pytest.mark.hazard("foreign-geometry")
@pytest.mark.parametrize("start_layer", [0, 2, 4])
@pytest.mark.parametrize("is_mla", [False, True])
def test_a_pipeline_stage(is_mla: bool, start_layer: int) -> None:
    """Guards against layers of another stage, and values taken from where another number of layers
    puts them: decode holds all six layers, this stage two."""
    scene = Scene(is_mla)
    keys, values = list(range(6)), list(range(10, 16))
    scene.info.dst_kv_ptrs = keys if is_mla else keys + values
    scene.manager.pp_size = 3
    scene.prefill.args.prefill_start_layer = start_layer
    pair = scene.layout.kv(scene.info, 17)
    mine = slice(start_layer, start_layer + 2)
    assert list(pair.destination.bases) == keys[mine] + ([] if is_mla else values[mine])
    assert list(pair.source.bases) == scene.prefill.args.kv_data_ptrs


def test_metadata_are_host_memory() -> None:
    """Guards against a GPU's number on host memory, and against sending only the first buffer."""
    scene = Scene()
    for slots in (5, None):
        pair = scene.layout.metadata(scene.info, slots)
        assert pair.source.device == pair.destination.device == 0
        assert (pair.source.slots, pair.destination.slots) == (5, slots or UNKNOWN_SLOTS)
        assert pair.source.item_lens == pair.destination.item_lens == METADATA
        assert list(pair.destination.bases) == scene.decode.args.aux_data_ptrs


@pytest.mark.parametrize(("ptrs", "count"), [("dst_aux_ptrs", 2), ("dst_kv_ptrs", 2)])
def test_a_peer_with_fewer_buffers(ptrs: str, count: int) -> None:
    """Guards against buffers that are left out where the check of the registration missed it: the
    room fails, with the numbers."""
    scene = Scene()
    setattr(scene.info, ptrs, getattr(scene.info, ptrs)[:count])
    with pytest.raises(TransferError, match=r"\d buffers with \d lengths") as caught:
        if ptrs == "dst_aux_ptrs":
            scene.layout.metadata(scene.info, 5)
        else:
            scene.layout.kv(scene.info, 17)
    assert caught.value.reason is Reason.MISMATCH


def test_an_address_that_cannot_be() -> None:
    """Guards against an address that wraps around into other memory."""
    scene = Scene()
    scene.info.dst_kv_ptrs = [2**64 - 8] * 4
    with pytest.raises(TransferError, match="does not fit into 64 bits") as caught:
        scene.layout.kv(scene.info, 17)
    assert caught.value.reason is Reason.MISMATCH


@pytest.mark.parametrize(
    ("is_mla", "their_size", "whole"),
    [(False, 1, True), (False, 2, False), (True, 1, True), (True, 2, True)],
)
def test_who_gets_whole_pages(is_mla: bool, their_size: int, whole: bool) -> None:
    """Guards against whole pages to a rank that holds other heads."""
    scene = Scene(is_mla, Side(2**40, 17, 0, their_size, is_mla=is_mla))
    assert (scene.layout.kv(scene.info, 17).source.heads is None) is whole


# ---- state ----


def test_recurrent_state() -> None:
    """Guards against state buffers that are taken for keys and values."""
    scene = Scene()
    pair = scene.layout.state(scene.info)
    assert list(pair.source.bases) == scene.prefill.args.state_data_ptrs
    assert list(pair.destination.bases) == scene.decode.args.state_data_ptrs
    assert (pair.source.item_lens, pair.source.slots) == (STATE, 6)
    assert pair.destination.slots == UNKNOWN_SLOTS


@pytest.mark.parametrize("kind", ["swa", "nsa"])
def test_state_in_pages_of_a_stage(kind: str) -> None:
    """Guards against state of another stage's layers."""
    scene = Scene(is_mla=True)
    scene.prefill.args.state_type = kind
    scene.prefill.args.prefill_start_layer = 2
    scene.info.dst_state_data_ptrs = list(range(6))
    assert list(scene.layout.state(scene.info).destination.bases) == [2, 3]


@pytest.mark.parametrize(
    ("kind", "is_mla", "their_size", "text"),
    [
        ("none", False, 1, "cannot transfer state of the kind 'none'"),
        ("something new", True, 1, "cannot transfer state of the kind 'something new'"),
        ("mamba", False, 2, "'mamba' needs equal tensor parallel sizes, not 1 on prefill and 2"),
        ("mamba", True, 2, "'mamba' needs equal tensor parallel sizes"),
        ("swa", False, 2, "'swa' needs equal tensor parallel sizes"),
        ("nsa", True, 2, None),
        ("swa", False, 1, None),
    ],
)
def test_state_that_is_not_served(
    kind: str, is_mla: bool, their_size: int, text: str | None
) -> None:
    """Guards against state that is moved as if it were of another kind or another rank's."""
    scene = Scene(is_mla)
    scene.prefill.args.state_type = kind
    scene.info.decode_tp_size = their_size
    if text is None:
        assert scene.layout.state(scene.info).source.item_lens == STATE
        return
    with pytest.raises(TransferError, match=text) as caught:
        scene.layout.state(scene.info)
    assert caught.value.reason is Reason.MISMATCH


# ---- heads ----


def of_heads(
    prefill: tuple[int, int], decode: tuple[int, int], total: int, slots: int | None = 17
) -> tuple[Scene, Pair]:
    """What a rank sends from and to (rank, size)."""
    scene = Scene(decode=Side(2**40, 17, *decode, total))
    scene.prefill = Side(2**63 - 5000, 12, *prefill, total)
    scene.layout = Layout(manager_of(scene.prefill))
    return scene, scene.layout.kv(scene.info, slots)


@pytest.mark.parametrize("slots", [17, None])
def test_values_shorter_than_keys(slots: int | None) -> None:
    """Guards against values that are cut by the length of keys, as stock does, on either side, and
    against a pool of one side with the tokens of the other."""
    scene, pair = of_heads((0, 1), (1, 2), 4, slots)
    count = 2  # heads of the decode rank
    for pool, side, held, first, pages in (
        (pair.source, scene.prefill, 4, 2, 12),
        (pair.destination, scene.decode, 2, 0, slots or UNKNOWN_SLOTS),
    ):
        sizes = [KEY_BYTES] * 2 + [VALUE_BYTES] * 2
        assert list(pool.bases) == [
            base + first * size for (base, _), size in zip(side.kv, sizes, strict=True)
        ]
        assert list(pool.item_lens) == [count * size for size in sizes]
        assert list(pool.strides) == [held * size for size in sizes]
        assert (pool.slots, pool.slots_a_page) == (pages * PAGE, PAGE)
        assert pool.device == side.args.gpu_id


@pytest.mark.parametrize("rank", range(4))
def test_of_replicas_one_sends(rank: int) -> None:
    """Guards against a head that is written twice, or by nobody, and against dividing by zero
    where there are fewer heads than ranks."""
    _, pair = of_heads((rank, 4), (0, 1), 2)
    assert bool(pair.source.bases) == bool(pair.destination.bases) == (rank in (0, 2))


def test_replicas_of_all_heads_are_whole_pages() -> None:
    """Guards against a descriptor a token where the ranks of both sizes hold the same."""
    scene, pair = of_heads((0, 1), (1, 2), 1)
    assert pair.source.heads is None and pair.source.slots == 12 and pair.destination.slots == 17
    assert list(pair.source.item_lens) == scene.prefill.args.kv_item_lens


def test_total_heads_are_derived_where_they_are_not_said() -> None:
    """Guards against a SGLang that does not fill in the number of heads of the model."""
    scene, pair = of_heads((0, 1), (1, 2), 4)
    del scene.prefill.args.total_kv_head_num
    assert scene.layout.kv(scene.info, 17) == pair


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"dst_kv_item_len": PAGE * KEY_BYTES}, "do not fit into decode's pages"),
        ({"dst_kv_item_len": 2 * PAGE * KEY_BYTES + 1}, "do not fit into decode's pages"),
        ({"decode_tp_size": 3, "decode_tp_rank": 0}, "4 KV heads cannot be laid out"),
        ({"dst_kv_ptrs": [1, 2]}, "3 buffers and 4 lengths"),
        ({"dst_kv_ptrs": [2**64 - 8] * 4}, "does not fit into 64 bits"),
    ],
)
def test_heads_that_do_not_fit(changes: dict[str, Any], text: str) -> None:
    """Guards against a peer's numbers that put heads beside its tokens: the room fails, with
    them."""
    scene, _ = of_heads((0, 1), (1, 2), 4)
    vars(scene.info).update(changes)
    with pytest.raises(TransferError, match=text) as caught:
        scene.layout.kv(scene.info, 17)
    assert caught.value.reason is Reason.MISMATCH
