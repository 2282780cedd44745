"""A decode server whose pool has an index of sparse attention (DSA) beside its KV.

That the index of each token is where its KV is, however it came there, is checked in
``test_stages`` and ``test_random_lives``.
"""

from __future__ import annotations

from component.decode.decoder import Decoder
from component.decode.steps import admit, finish, ids, serve

PAGE = 64  # SGLang's pool has no other


def test_a_turn_is_sent_the_index_of_its_delta() -> None:
    """Guards against an index that is not announced, or of pages that the tree holds."""
    decoder = Decoder(PAGE, 1024, sparse=True)
    (first,) = serve(decoder, ids(1, 150), new=50)
    assert decoder.rooms[-1].state_pages.tolist() == decoder.rooms[-1].pages.tolist()
    admit(decoder, [*first.origin_input_ids, *first.output_ids, *ids(2, 30)])
    room = decoder.rooms[-1]
    assert room.prefix_len == 192 and len(room.state_pages) == 1
    finish(decoder)


def test_of_a_full_hit_no_index_is_announced() -> None:
    """Guards against a list of no pages: prefill sends nothing for it, and SGLang's decode would
    wait for that."""
    decoder = Decoder(PAGE, 1024, sparse=True)
    for _ in range(2):
        serve(decoder, ids(1, 128))
    assert len(decoder.rooms[-1].pages) == 0 and decoder.rooms[-1].state_pages is None
