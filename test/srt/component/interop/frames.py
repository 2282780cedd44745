"""What a decode server of SGLang 0.5.12.post1 sends to a prefill rank, byte for byte.

``test_later_release.py`` lets the real release say it again.
"""

from __future__ import annotations

RELEASE = "0.5.12.post1"
ROOM, PAGE = 7, 8
_PAGES = b"\x04\x00\x00\x00\x05\x00\x00\x00"
_KV = b"\x00\x00\x00\x00\x00\x00\x00\x00\x01\x00\x00\x00\x00\x00\x00\x00"
_METADATA = b"\x09\x00\x00\x00\x00\x00\x00\x00"
_NIXL = [b"NixlMsgGuard", b"7", b"10.0.0.2", b"4000", b"D"]
_MOONCAKE = [b"7", b"10.0.0.2", b"4000", b"10.0.0.2:5000"]

#: By backend and by what is announced: two pages 4 and 5 in metadata slot 3, after a prefix of so
#: many tokens; no pages (a full hit of 24 tokens); nothing to this rank (latent KV, of which one
#: prefill rank of several sends all).
ANNOUNCED: dict[str, dict[str, list[bytes]]] = {
    "nixl": {
        "all": [*_NIXL, _PAGES, b"3", b"1", b"", b"0"],
        "rest": [*_NIXL, _PAGES, b"3", b"1", b"", b"16"],
        "full hit": [*_NIXL, b"", b"3", b"1", b"", b"24"],
        "nothing": [*_NIXL, b"", b"3", b"1", b"", b"0"],
        "nothing after a prefix": [*_NIXL, b"", b"3", b"1", b"", b"16"],
    },
    "mooncake": {
        "all": [*_MOONCAKE, _PAGES, b"3", b"", b"1", b"0"],
        "rest": [*_MOONCAKE, _PAGES, b"3", b"", b"1", b"16"],
        "full hit": [*_MOONCAKE, b"", b"3", b"", b"1", b"24"],
        "nothing": [*_MOONCAKE, b"", b"", b"", b"1", b"0"],
        "nothing after a prefix": [*_MOONCAKE, b"", b"", b"", b"1", b"16"],
    },
}

#: Two buffers of KV with pages of 64 bytes and one of metadata, tensor parallel size 1.
REGISTERED: dict[str, list[bytes]] = {
    "nixl": [
        *[b"NixlMsgGuard", b"None", b"10.0.0.2", b"4000", b"D", b"metadata", _KV, _METADATA],
        *[b"", b"0", b"1", b"0", b"64", b"", b"", b"", b""],
    ],
    "mooncake": [
        *[b"None", b"10.0.0.2", b"4000", b"10.0.0.2:5000", _KV, _METADATA],
        *[b"", b"0", b"1", b"64", b"", b"", b"0", b"", b""],
    ],
}
