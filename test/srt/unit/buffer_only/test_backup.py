"""What a node knows about its copy in the store, whatever happens to the node meanwhile; pending
writes: bounded, once a node, in order, and none for what is gone."""

from __future__ import annotations

import pytest

from sglang.srt.mem_cache.buffer_only.backup_queue import (
    EVICTED,
    FLUSHED,
    FULL,
    BackupQueue,
    Segment,
    settle,
)
from unit.buffer_only.nodes import chain


def test_storage_ready():
    """Backed up on the host, or all of it in the store."""
    (node,) = chain(8)
    assert not node.storage_backed and not node.storage_ready
    node.stored = 7
    assert not node.storage_backed
    node.stored = 8
    assert node.storage_backed and node.storage_ready
    node.stored, node.backuped = 0, True
    assert node.storage_ready and not node.storage_backed


@pytest.mark.hazard("split-while-under-way")
@pytest.mark.parametrize("durable", range(9))
@pytest.mark.parametrize("cuts", [(), (3,), (5,), (2, 3), (1, 1, 1)])
def test_a_write_settles_whatever_the_node_was_split_into(durable: int, cuts: tuple[int, ...]):
    """Counted from a node's end, a position outlives every split of its front."""
    (node,) = chain(8)
    node.launched = 8
    segment = Segment(node, 8, 0)
    parts = [node.split(cut) for cut in cuts] + [node]
    settle(segment, durable)
    left = durable
    for part in parts:
        expected = min(left, len(part.key))
        assert part.stored == expected
        assert part.launched == (len(part.key) if durable == 8 else expected)
        left -= expected


def test_the_second_half_of_a_write_does_not_count_without_the_first():
    """Pages behind a hole are out of reach; both are written again."""
    (node,) = chain(8)
    node.launched = 8
    first, second = Segment(node, 8, 4), Segment(node, 4, 0)
    settle(first, 0)
    settle(second, 4)
    assert node.stored == 0 and node.launched == 0


def test_a_failure_in_front_of_a_split_leaves_the_part_behind_it_alone():
    """What is on its way for the other half is none of its business."""
    (node,) = chain(8)
    node.launched = 8
    first, second = Segment(node, 8, 4), Segment(node, 4, 0)
    front = node.split(4)
    settle(first, 1)
    assert (front.stored, front.launched) == (1, 1) and (node.stored, node.launched) == (0, 4)
    settle(second, 4)
    assert node.storage_backed and not front.storage_backed


def test_in_order_and_bounded():
    """The bound is in tokens; what does not fit is counted and not half queued."""
    queue = BackupQueue(max_tokens=10)
    first, second, third = chain(4, 6, 1)
    assert queue.add(first) and queue.add(second) and not queue.add(third)
    assert queue.dropped[FULL] == 1 and third.pending is None
    assert [pending.node for pending in queue] == [first, second] and queue.tokens == 10
    queue.done(queue.head())
    assert queue.head().node is second and first.pending is None and queue.tokens == 6


def test_a_split_keeps_both_halves_in_one_entry():
    """Or the front would never be written and the rest be out of reach."""
    queue = BackupQueue(100)
    (node,) = chain(8)
    queue.add(node)
    front = node.split(2)
    middle = node.split(3)
    (pending,) = queue
    assert pending.pieces() == [front, middle, node]
    assert front.pending is middle.pending is node.pending is pending
    queue.done(pending)
    assert front.pending is middle.pending is node.pending is None and queue.tokens == 0


def test_what_is_deleted_is_dropped_and_the_rest_stays_in_its_place():
    """The last part of a split node is evicted first; its front keeps its place in the queue, ahead
    of the children that it has got meanwhile."""
    queue = BackupQueue(100)
    parent, other = chain(8, 4)
    queue.add(parent)
    queue.add(other)
    front = parent.split(2)
    queue.deleted(parent)
    assert queue.dropped[EVICTED] == 6 and queue.tokens == 2 + 4
    assert [pending.node for pending in queue] == [front, other]
    queue.deleted(front)
    assert [pending.node for pending in queue] == [other] and queue.dropped[EVICTED] == 8
    queue.deleted(chain(3)[0])  # never queued
    assert queue.tokens == 4


def test_flushed():
    """Nothing of an emptied tree is written."""
    queue = BackupQueue(100)
    for node in chain(3, 4):
        queue.add(node)
    queue.clear(FLUSHED)
    assert len(queue) == 0 and queue.tokens == 0 and queue.dropped[FLUSHED] == 7
