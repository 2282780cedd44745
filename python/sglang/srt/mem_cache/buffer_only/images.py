"""The images of a prompt (and its other media), for the keys of its pages.

SGLang puts 30 bits of an image's hash in the place of its tokens, and page hashes are made of
these: among 200,000 images behind one prefix, 19 pairs are expected to be one. So the key of a page
has the full hashes of all images that begin before its end. A request's ``extra_key`` brings them
to the nodes that it inserts; it is equal to the one without them, so that the tree is SGLang's,
with its 30 bits. Where these have a request share KV of another image, nothing that is computed
behind that is written to the store.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from sglang.srt.mem_cache.buffer_only.backup_queue import path_pieces

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.radix_cache import TreeNode


class ImageKey(str):
    """An ``extra_key`` with the images of one prompt."""

    #: Where each one begins, in tokens of the prompt, and its full hash; in that order.
    images: tuple[tuple[int, int], ...] = ()


def image_key(req: Req) -> ImageKey:
    """The ``extra_key`` of ``req`` with its images, each where it is first shown; that it is shown
    again the tokens say. Of several with one placeholder they do not say which, so that all are
    named. One without a place counts from the start."""
    key = ImageKey(req.extra_key or "")
    if req.multimodal_inputs is not None:
        hashes: dict[int, list[int]] = {}
        for one in req.multimodal_inputs.mm_items:
            hashes.setdefault(one.pad_value, []).append(one.hash)
        place: dict[int, int] = {}
        for at, token in enumerate(req.origin_input_ids):
            if token in hashes:
                place.setdefault(token, at)
        found = [
            (place.get(pad, 0), name)
            for pad, names in hashes.items()
            for name in (names[:1] if pad in place and len(set(names)) == 1 else names)
        ]
        key.images = tuple(sorted(found, key=lambda image: image[0]))
    return key


def images_before(extra_key: str | None, tokens: int) -> str:
    """The images that begin in the first ``tokens`` tokens, as a name; empty without any."""
    return " ".join(str(name) for at, name in getattr(extra_key, "images", ()) if at < tokens)


def tokens_above(node: TreeNode) -> int:
    """Tokens of the prompt before those of ``node``."""
    return sum(len(one.key) for one, _ in path_pieces(node, sys.maxsize)) - len(node.key)


def has_own_images(node: TreeNode) -> bool:
    """Whether all nodes above ``node`` have the images of its own request there."""
    own = node.key.extra_key
    if not isinstance(own, ImageKey):
        return True  # the model takes none
    length = tokens_above(node) + len(node.key)
    return all(
        images_before(above.key.extra_key, length - back) == images_before(own, length - back)
        for above, back in path_pieces(node, length)
    )
