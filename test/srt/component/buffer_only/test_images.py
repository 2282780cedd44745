"""Two images that SGLang takes for one, because the 30 bits of their hashes in a prompt are equal.
In the store their pages must not collide."""

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
    """Return a request of two pages of text, six tokens an image, and text up to seven pages."""
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
    """Serve a request; return its hit tokens."""
    hit = cache.serve(rid, [*req.origin_input_ids, *more], req.extra_key)
    cache.settle()
    return hit


@pytest.mark.hazard("tenants-meet-in-store")
@CACHES
def test_images_with_one_placeholder_do_not_meet_in_the_store(changes: dict[str, Any]):
    """Guards against a hit on another image's pages. The text before images is shared, and so are
    requests with equal images, or with none."""
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
    """Guards against stored KV of a wrong image: a server's tree knows only the placeholder."""
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
    """Guards against pages that are lost when the next turn shows the image again."""
    cache = Cache(tokens=100 * PAGE, **changes)
    serve(cache, "a turn", request(ONE))
    cache.flush()
    # Two pages of text, and one of the image; in the fourth one it ends, and is shown again.
    assert serve(cache, "the next turn", request(ONE, ONE)) == 3 * PAGE


def test_pages_in_use_are_looked_up_under_their_own_keys():
    """Guards against look-ups under plain keys, which would count all pages as lost."""
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
    keys_of_request = cache.keys(req.origin_input_ids, req.extra_key)
    assert looked_up and all(keys == keys_of_request for keys in looked_up)
    assert not cache.buffer.context.counters["store_lost_pages"]


def test_image_keys_name_images_by_position():
    """Guards against keys that do not tell images apart: they are named in the order of the prompt,
    also with equal placeholders; one that is not in the prompt is placed at its start. The tree
    still shares prefixes, because the key equals the plain one."""
    req = request(ONE, 5, OTHER, extra_key="tenant")
    assert req.extra_key == "tenant" and hash(req.extra_key) == hash("tenant")
    assert req.extra_key.images == ((8, ONE), (8, OTHER), (14, 5))
    assert request(ONE, 5, ONE).extra_key.images == ((8, ONE), (14, 5)), (
        "an image shown twice is named once"
    )
    # With equal placeholders the position of each image is unknown, so all are named.
    twice = request(ONE, ONE, OTHER), request(ONE, OTHER, ONE)
    assert len({req_of_order.extra_key.images for req_of_order in twice}) == 2
    req.multimodal_inputs.mm_items[1].pad_value = 3_000_000
    assert image_key(req).images[0] == (0, 5)
    assert image_key(request()) == "" and image_key(request()).images == ()
