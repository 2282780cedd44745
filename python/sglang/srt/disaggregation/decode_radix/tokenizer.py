"""What a decode server with the radix cache says before a request reaches its scheduler."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from typing_extensions import override

from sglang.srt.patchset.compat import FLAG

if TYPE_CHECKING:
    from sglang.srt.managers.tokenizer_manager import TokenizerManager
else:
    TokenizerManager = object


class RadixTokenizer(TokenizerManager):
    """Names our flag where SGLang advises ``--disable-radix-cache``, which the flag refuses."""

    @override
    async def _tokenize_one_request(self, obj: Any) -> Any:
        wanted = getattr(self.server_args, "disaggregation_decode_enable_radix_cache", False)
        if wanted and obj.input_embeds is not None:
            raise ValueError(
                f"input_embeds cannot be served by a decode server with {FLAG}: SGLang takes them "
                "only where no radix cache is. Send them to a decode server without the flag, and "
                "to a prefill server with --disable-radix-cache."
            )
        return await super()._tokenize_one_request(obj)
