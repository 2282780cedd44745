"""Processes, torch and grammar libraries without CUDA."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any  # Any: modules that are edited, and their objects

from . import StandinRefused
from .memory import Instead


def torch_without_cuda(torch: Any) -> None:
    """Refuse where torch sees a device; else make waiting for the device a no-op, and
    ``torch.compile`` return what it is given.

    SGLang synchronizes around the CPU copy of a retracted request's KV on every device, and says
    which streams use a tensor where speculation overlaps with scheduling. It decorates a few small
    functions with ``torch.compile``: on a CPU that would cost more than it gives. Each process
    imports inductor at start (over a third of its start-up), and the first request waits for a C++
    compiler, which a fresh machine need not have.
    """
    if torch.cuda.is_available():
        raise StandinRefused("torch sees a CUDA device")

    def nothing(*args: object, **options: object) -> None:
        """There is no device to wait for, and one stream only."""

    def compile(model: Callable[..., Any] | None = None, **options: Any) -> Callable[..., Any]:
        """Both forms: ``compile(f)`` and ``@compile(...)``."""
        return model if model is not None else lambda function: function

    torch.cuda.synchronize, torch.Tensor.record_stream, torch.compile = nothing, nothing, compile


def start_method(engine: Any) -> None:
    """Have ``entrypoints.engine`` fork, where the environment asks for it.

    SGLang spawns its scheduler and detokenizer, and each imports everything again: on a CPU that is
    nearly all of a server's start. With ``SGLANG_CPU_STANDIN_START_METHOD=fork`` they are forked
    from the launcher, which has it all in memory. That is safe here because no CUDA context and no
    OpenMP pool exist at that time. It is not the default, since a spawned process is what
    production runs.
    """
    from sglang.srt.patchset.environment import START_METHOD

    try:
        method = START_METHOD.read()
    except ValueError as error:
        raise ImportError(str(error)) from None
    if method == "fork":
        set_method = engine.mp.set_start_method
        # Whatever the caller asks for.
        engine.mp = Instead(
            engine.mp, set_start_method=lambda method, force=False: set_method("fork", force=True)
        )


def mask_by_xgrammar(module: Any) -> None:
    """Mask logits with xgrammar's own CPU kernel."""

    def mask_on_cpu(logits: Any, vocab_mask: Any) -> None:
        from xgrammar import apply_token_bitmask_inplace

        apply_token_bitmask_inplace(logits, vocab_mask)

    module.XGrammarGrammar.apply_vocab_mask = staticmethod(mask_on_cpu)


def mask_of_each_batch(module: Any) -> None:
    """Have llguidance allocate a mask for each batch.

    SGLang 0.5.10 keeps the mask of the batch before and clears none of its rows, so that a request
    without a grammar is held to the tokens of an earlier one in its row.
    """
    grammar = module.GuidanceGrammar
    allocate = grammar.allocate_vocab_mask
    grammar.allocate_vocab_mask = lambda self, *args, **kwargs: allocate(
        SimpleNamespace(bitmask=None, llguidance_tokenizer=self.llguidance_tokenizer),
        *args,
        **kwargs,
    )
