"""Pending writes: bounded, once a node, in order, and none for what is gone."""

from __future__ import annotations

from sglang.srt.mem_cache.buffer_only.intents import EVICTED, FLUSHED, FULL, IntentQueue
from unit.buffer_only.nodes import chain


def test_in_order_and_bounded():
    """The bound is in tokens; what does not fit is counted and not half queued."""
    queue = IntentQueue(max_tokens=10)
    first, second, third = chain(4, 6, 1)
    assert queue.add(first) and queue.add(second) and not queue.add(third)
    assert queue.dropped[FULL] == 1 and third.intent is None
    assert [intent.node for intent in queue] == [first, second] and queue.tokens == 10
    queue.done(queue.head())
    assert queue.head().node is second and first.intent is None and queue.tokens == 6


def test_a_split_keeps_both_halves_in_one_intent():
    """Or the front would never be written and the rest be out of reach."""
    queue = IntentQueue(100)
    (node,) = chain(8)
    queue.add(node)
    front = node.split(2)
    middle = node.split(3)
    (intent,) = queue
    assert intent.pieces() == [front, middle, node]
    assert front.intent is middle.intent is node.intent is intent
    queue.done(intent)
    assert front.intent is middle.intent is node.intent is None and queue.tokens == 0


def test_what_is_deleted_is_dropped_and_the_rest_stays_in_its_place():
    """The last part of a split node is evicted first; its front keeps its place in the queue, ahead
    of the children that it has got meanwhile."""
    queue = IntentQueue(100)
    parent, other = chain(8, 4)
    queue.add(parent)
    queue.add(other)
    front = parent.split(2)
    queue.deleted(parent)
    assert queue.dropped[EVICTED] == 6 and queue.tokens == 2 + 4
    assert [intent.node for intent in queue] == [front, other]
    queue.deleted(front)
    assert [intent.node for intent in queue] == [other] and queue.dropped[EVICTED] == 8
    queue.deleted(chain(3)[0])  # never queued
    assert queue.tokens == 4


def test_flushed():
    """Nothing of an emptied tree is written."""
    queue = IntentQueue(100)
    for node in chain(3, 4):
        queue.add(node)
    queue.clear(FLUSHED)
    assert len(queue) == 0 and queue.tokens == 0 and queue.dropped[FLUSHED] == 7
