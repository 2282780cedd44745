"""What a node knows about its copy in the store, whatever happens to the node meanwhile; pending
writes: bounded, once a node, in order, and none for what is gone."""

from __future__ import annotations

import pytest

from sglang.srt.mem_cache.buffer_only.backup_queue import (
    EVICTED,
    BackupQueue,
    Segment,
    settle,
)
from unit.buffer_only.nodes import chain


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
