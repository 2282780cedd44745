"""Structured output on a CPU: xgrammar's own CPU kernel, and a mask of its own for each batch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any  # Any: modules that are edited, and their objects


def edit(module: Any) -> None:
    """Mask logits on the CPU with xgrammar; have llguidance allocate a mask for each batch."""
    if hasattr(module, "XGrammarGrammar"):
        module.XGrammarGrammar.apply_vocab_mask = staticmethod(_mask_on_cpu)
        return
    grammar = module.GuidanceGrammar
    allocate = grammar.allocate_vocab_mask
    # SGLang 0.5.10 keeps the mask of the batch before and clears none of its rows, so that a
    # request without a grammar is held to the tokens of an earlier one in its row.
    grammar.allocate_vocab_mask = lambda self, *args, **kwargs: allocate(
        SimpleNamespace(bitmask=None, llguidance_tokenizer=self.llguidance_tokenizer),
        *args,
        **kwargs,
    )


def _mask_on_cpu(logits: Any, vocab_mask: Any) -> None:
    from xgrammar import apply_token_bitmask_inplace

    apply_token_bitmask_inplace(logits, vocab_mask)
