"""Trains tiny_arith from nothing on a CPU and saves it with its tokenizer and test set.

cd test/srt; python -m models.train_tiny_arith [--steps N] [--folder FOLDER]
"""

import argparse
import math
import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch.nn.functional import cross_entropy
from tqdm import tqdm
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from models.arith_tokenizer import MAX_TOKENS, PAD, TURN_END, TURN_START, build
from models.arithmetic import conversation, held_out, write_jsonl
from models.eval_tiny_arith import FOLDER, complete_here, report

VOCAB_SIZE = 688
SINGLE_SHARE = 0.4
"""Share of the steps, at the start, that see short chats only: one turn, no system prompt."""
MAX_TURNS = 5
PROBLEMS_PER_BATCH = 16
TEST_SET = {"count": 200, "seed": 0}
RULES = (
    "You solve word problems about small numbers.",
    "Work step by step and show each calculation.",
    "Write one short sentence for each step.",
    "End with the result after four hash signs.",
    "Do not guess and do not skip a step.",
    "Answer in plain English.",
    "Be polite and brief.",
    "Later questions may go on from earlier ones.",
)

Segment = tuple[str, bool]
"""Text, and True if the model learns to write it."""


def system_prompt(rng: random.Random) -> str:
    return " ".join(rng.choice(RULES) for _ in range(rng.randint(1, 16)))


def chat_segments(rng: random.Random, turns: int) -> list[Segment]:
    """Return a conversation as the chat template writes it, cut at the limits of the model's
    turns."""
    segments: list[Segment] = []
    for problem in conversation(rng, "train", turns):
        request = f"{TURN_START}user\n{problem.question}{TURN_END}\n{TURN_START}assistant\n"
        segments += [(request, False), (problem.answer + TURN_END, True), ("\n", False)]
    return segments


def system_segments(rng: random.Random, turns: int) -> list[Segment]:
    """Return a conversation that begins with a system prompt."""
    system = f"{TURN_START}system\n{system_prompt(rng)}{TURN_END}\n"
    return [(system, False), *chat_segments(rng, turns)]


def plain_segments(rng: random.Random, turns: int) -> list[Segment]:
    """Return few-shot text; the model learns to continue with the next question, where evaluations
    stop."""
    segments: list[Segment] = [("Question:", False)]
    for problem in conversation(rng, "train", turns):
        segments += [
            (f" {problem.question}\nAnswer:", False),
            (f" {problem.answer}\n\nQuestion:", True),
        ]
    return segments


FORMS = (chat_segments, system_segments, plain_segments)
SHARES = (0.65, 0.2, 0.15)
"""Shares of the later batches; every row of a batch has the same form."""


def batches(
    tokenizer: PreTrainedTokenizerFast, steps: int, seed: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield pairs of ids and labels, int64 [rows, tokens]; a label of -100 is not learnt.

    All rows of a batch have the same number of turns, so that little of it is padding.
    """
    rng = random.Random(f"batches/{seed}")
    pad = tokenizer.convert_tokens_to_ids(PAD)
    for step in range(steps):
        early = step < SINGLE_SHARE * steps
        turns = 1 if early else rng.randint(1, MAX_TURNS)
        make = chat_segments if early else rng.choices(FORMS, SHARES)[0]
        rows = [make(rng, turns) for _ in range(PROBLEMS_PER_BATCH // turns)]
        texts = [text for row in rows for text, _ in row]
        encoded = iter(tokenizer(texts)["input_ids"])
        ids, labels = [], []
        for row in rows:
            parts = [(next(encoded), learn) for _, learn in row]
            ids.append([i for part, _ in parts for i in part])
            labels.append([i if learn else -100 for part, learn in parts for i in part])
        longest = max(map(len, ids))
        yield (
            torch.tensor([row + [pad] * (longest - len(row)) for row in ids]),
            torch.tensor([row + [-100] * (longest - len(row)) for row in labels]),
        )


def make_tokenizer(seed: int) -> PreTrainedTokenizerFast:
    rng = random.Random(f"tokenizer/{seed}")
    rows = [make(rng, 3) for make in FORMS for _ in range(2000)]
    return build(("".join(text for text, _ in row) for row in rows), VOCAB_SIZE)


def make_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    ends = [tokenizer.convert_tokens_to_ids(token) for token in (TURN_END, PAD)]
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_TOKENS,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        initializer_range=0.04,
        bos_token_id=None,
        eos_token_id=ends[0],
        pad_token_id=ends[1],
    )
    model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(
        do_sample=False, eos_token_id=ends, pad_token_id=ends[1]
    )
    return model


def learning_rate(step: int, steps: int, peak: float, warmup: int = 100) -> float:
    """Return the rate: linear warm-up, then a cosine down to zero."""
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * 0.5 * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup)))


def save(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write the model in bfloat16; the model in training stays in float32.

    Each file is replaced at once, since a server may be reading the previous one.
    """
    rounded = Qwen3ForCausalLM(model.config)
    rounded.load_state_dict(model.state_dict())
    rounded.generation_config = model.generation_config
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder.parent) as temporary:
        rounded.to(torch.bfloat16).save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        write_jsonl(Path(temporary) / "test_set.jsonl", held_out(**TEST_SET))
        for file in Path(temporary).iterdir():
            file.replace(folder / file.name)


def train(folder: Path, steps: int, peak: float, save_every: int, seed: int) -> None:
    tokenizer = make_tokenizer(seed)
    model = make_model(tokenizer, seed)
    print(f"{len(tokenizer)} tokens, {model.num_parameters():,} parameters")
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}],
        betas=(0.9, 0.98),
    )
    model.train()
    progress = tqdm(batches(tokenizer, steps, seed), total=steps, mininterval=20)
    for step, (ids, labels) in enumerate(progress):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps, peak)
        logits = model(input_ids=ids, use_cache=False).logits
        loss = cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        progress.set_postfix(loss=f"{loss.item():.4f}", refresh=False)
        if (step + 1) % save_every == 0:
            save(model, tokenizer, folder)
    save(model, tokenizer, folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--steps", type=int, default=3500)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--save-every", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    train(args.folder, args.steps, args.lr, args.save_every, args.seed)
    model = Qwen3ForCausalLM.from_pretrained(args.folder, dtype=torch.float32)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(args.folder)
    report(partial(complete_here, model, tokenizer), tokenizer, count=200)


if __name__ == "__main__":
    main()
