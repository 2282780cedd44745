"""Two images that SGLang takes for one: the 30 bits of their hashes that stand in a prompt are the
same. In the store their pages must not meet."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from component.buffer_only.cache import PAGE, Cache, prompt
from sglang.srt.managers.schedule_batch import Modality, MultimodalDataItem, MultimodalInputs
from sglang.srt.mem_cache.buffer_only.nodes import image_key

ONE = 0x1234567890ABCDEF
#: Another image with the same placeholder.
OTHER = ONE + (7 << 30)
TEXT = prompt(1, 2)
CACHES = pytest.mark.parametrize(
    "changes",
    [{}, {"settings": {"pass_prefix_keys": True}}],
    ids=["without prefix keys", "prefix keys"],
)


def request(*images: int, extra_key: str | None = None) -> Any:
    """Two pages of text, six tokens of each image, and text to the end of the seventh page."""
    items = [MultimodalDataItem(Modality.IMAGE, hash=image) for image in images]
    for item in items:
        item.set_pad_value()
    tokens = TEXT + [token for item in items for token in [item.pad_value] * 6]
    req = SimpleNamespace(
        origin_input_ids=[*tokens, *range(7 * PAGE + 1 - len(tokens))],
        extra_key=extra_key,
        multimodal_inputs=MultimodalInputs(items) if items else None,
    )
    req.extra_key = image_key(req)
    return req


def serve(cache: Cache, rid: str, req: Any, more: tuple[int, ...] = ()) -> int:
    """Tokens that were fetched or found for a request."""
    hit = cache.serve(rid, [*req.origin_input_ids, *more], req.extra_key)
    cache.settle()
    return hit


@pytest.mark.hazard("tenants-meet-in-store")
@CACHES
def test_images_with_one_placeholder_do_not_meet_in_the_store(changes: dict[str, Any]):
    """The text before them does, and so do requests with the same images, and with none."""
    cache = Cache(tokens=100 * PAGE, **changes)
    mine, theirs, text = request(ONE), request(OTHER), request()
    assert mine.origin_input_ids == theirs.origin_input_ids
    serve(cache, "mine", mine)
    cache.flush()
    assert serve(cache, "theirs", theirs) == 2 * PAGE
    for req, hit in ((mine, 7), (theirs, 7), (text, 2)):
        cache.flush()
        assert serve(cache, "again", req) == hit * PAGE


@pytest.mark.hazard("tenants-meet-in-store")
@CACHES
def test_what_was_computed_behind_another_image_is_not_written(changes: dict[str, Any]):
    """One server's own tree knows the placeholder alone, as SGLang's does."""
    cache = Cache(tokens=100 * PAGE, **changes)
    mine, theirs, more = request(ONE), request(OTHER), tuple(range(500, 500 + 3 * PAGE))
    serve(cache, "mine", mine)
    assert serve(cache, "theirs", theirs, more) == 7 * PAGE, "SGLang's tree takes it for a hit"
    serve(cache, "and its next turn", theirs, (*more, *range(900, 900 + 3 * PAGE)))
    cache.flush()
    assert serve(cache, "again", theirs, more) == 2 * PAGE
    cache.flush()
    assert serve(cache, "and again", theirs, more) == 10 * PAGE


@CACHES
def test_an_image_that_is_shown_again_leaves_its_pages(changes: dict[str, Any]):
    """In the next turn of a conversation: what was written for the first one is found."""
    cache = Cache(tokens=100 * PAGE, **changes)
    serve(cache, "a turn", request(ONE))
    cache.flush()
    # Two pages of text, and one of the image; in the fourth one it ends, and is shown again.
    assert serve(cache, "the next turn", request(ONE, ONE)) == 3 * PAGE


def test_what_is_used_is_looked_up_under_its_keys():
    """Or all of it would count as lost."""
    cache = Cache(tokens=100 * PAGE)
    req = request(ONE)
    serve(cache, "r", req)
    cache.now += 11
    serve(cache, "r", req)
    cache.now += 11
    cache.store.calls.clear()
    serve(cache, "r", req)
    for _ in range(3):
        cache.step()
    looked_up = cache.store.asked("batch_exists")
    own = cache.keys(req.origin_input_ids, req.extra_key)
    assert looked_up and all(keys == own for keys in looked_up)
    assert not cache.buffer.context.counters["store_lost_pages"]


def test_where_images_begin():
    """In the order of the prompt, also those of one placeholder; what is not in it counts from its
    start. The key is equal to the plain one: the tree shares what it shared."""
    req = request(ONE, 5, OTHER, extra_key="tenant")
    assert req.extra_key == "tenant" and hash(req.extra_key) == hash("tenant")
    assert req.extra_key.images == ((8, ONE), (8, OTHER), (14, 5))
    assert request(ONE, 5, ONE).extra_key.images == ((8, ONE), (14, 5)), "shown twice, it is one"
    # Of one placeholder nobody knows where each of several images is: all of them are named.
    twice = request(ONE, ONE, OTHER), request(ONE, OTHER, ONE)
    assert len({each.extra_key.images for each in twice}) == 2
    req.multimodal_inputs.mm_items[1].pad_value = 3_000_000
    assert image_key(req).images[0] == (0, 5)
    assert image_key(request()) == "" and image_key(request()).images == ()
