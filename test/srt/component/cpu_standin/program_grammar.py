"""SGLang's grammar backends mask logits on a CPU, only in the row of the grammar's request."""

from typing import Any

import torch
from transformers import AutoTokenizer

from benchmark.harness.models import TINY_ARITH
from sglang.srt.constrained.llguidance_backend import GuidanceBackend
from sglang.srt.constrained.xgrammar_backend import XGrammarGrammarBackend

TOKENIZER = AutoTokenizer.from_pretrained(TINY_ARITH)
VOCABULARY = len(TOKENIZER)
SCHEMA = '{"type": "boolean"}'


def allowed(grammar: Any, row: int | None) -> torch.Tensor:
    """Return the allowed tokens of two requests if the one in ``row`` has the grammar."""
    mask = grammar.allocate_vocab_mask(vocab_size=VOCABULARY, batch_size=2, device="cpu")
    if row is not None:
        grammar.fill_vocab_mask(mask, row)
    logits = torch.zeros(2, VOCABULARY)
    grammar.apply_vocab_mask(logits, grammar.move_vocab_mask(mask, "cpu"))
    return logits == 0


for backend in (
    XGrammarGrammarBackend(TOKENIZER, VOCABULARY, [TOKENIZER.eos_token_id]),
    GuidanceBackend(TOKENIZER, n_vocab=VOCABULARY),
):
    grammar = backend.dispatch_json(SCHEMA)
    for row in (0, 1):
        tokens = allowed(grammar, row)
        assert 0 < tokens[row].sum() < VOCABULARY, backend
        assert tokens[1 - row].all(), f"{backend}: another request's row is masked"
print("CHECKED")
