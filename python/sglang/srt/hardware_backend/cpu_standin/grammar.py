"""Structured output on a CPU: xgrammar's own CPU kernel, and a mask of its own for each batch."""

from __future__ import annotations

from typing import Any  # Any: modules that are edited, and their objects


def edit(module: Any) -> None:
    """Mask logits on the CPU with xgrammar; have llguidance allocate a mask for each batch."""
    if hasattr(module, "XGrammarGrammar"):
        module.XGrammarGrammar.apply_vocab_mask = staticmethod(_mask_on_cpu)
    if hasattr(module, "GuidanceGrammar"):
        _never_reuse(module.GuidanceGrammar)


def _mask_on_cpu(logits: Any, vocab_mask: Any) -> None:
    from xgrammar import apply_token_bitmask_inplace

    apply_token_bitmask_inplace(logits, vocab_mask)


def _never_reuse(grammar: Any) -> None:
    # SGLang 0.5.10 keeps the mask of the batch before and clears none of its rows, so that a
    # request without a grammar is held to the tokens of one that had its place.
    allocate = grammar.allocate_vocab_mask

    def allocate_vocab_mask(self: Any, vocab_size: int, batch_size: int, device: object) -> Any:
        self.bitmask = None
        return allocate(self, vocab_size, batch_size, device)

    grammar.allocate_vocab_mask = allocate_vocab_mask
