"""Accuracy of a model on held-out problems, by greedy decoding.

cd test/srt
python -m models.eval_tiny_arith [FOLDER]                     in transformers
python -m models.eval_tiny_arith --url http://127.0.0.1:PORT  in an SGLang server
"""

import argparse
import json
import random
import urllib.request
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

from models.arithmetic import Problem, conversation, number_of, problems

FOLDER = Path(__file__).parent / "tiny_arith"
MAX_NEW_TOKENS = 120
"""More than the tokens of the longest worked answer."""
ROWS = 50
"""Number of prompts sent or run at once."""

Complete = Callable[[list[str]], list[str]]
"""Returns the greedy continuation of each prompt up to the end of the turn, without special
tokens."""


def complete_here(model: Any, tokenizer: Any, prompts: list[str]) -> list[str]:
    """Run `Complete` with a model of transformers."""
    texts: list[str] = []
    for start in range(0, len(prompts), ROWS):
        inputs = tokenizer(
            prompts[start : start + ROWS],
            return_tensors="pt",
            padding=True,
            padding_side="left",
            return_token_type_ids=False,
        )
        output = model.generate(**inputs, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)
        new = output[:, inputs["input_ids"].shape[1] :]
        texts += tokenizer.batch_decode(new, skip_special_tokens=True)
    return texts


def complete_there(url: str, prompts: list[str]) -> list[str]:
    """Run `Complete` with an SGLang server."""
    texts: list[str] = []
    for start in range(0, len(prompts), ROWS):
        body = {
            "text": prompts[start : start + ROWS],
            "sampling_params": {"temperature": 0, "max_new_tokens": MAX_NEW_TOKENS},
        }
        request = urllib.request.Request(
            f"{url}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=600) as response:
            texts += [result["text"] for result in json.load(response)]
    return texts


def accuracy_by_turn(
    complete: Complete, tokenizer: Any, conversations: list[list[Problem]]
) -> list[float]:
    """Return the share of right answers at each turn; the model reads its own earlier answers."""
    histories: list[list[dict[str, str]]] = [[] for _ in conversations]
    shares = []
    for turn in tqdm(range(len(conversations[0])), desc="turns"):
        for history, chat in zip(histories, conversations, strict=True):
            history.append({"role": "user", "content": chat[turn].question})
        prompts = [
            tokenizer.apply_chat_template(history, tokenize=False, add_generation_prompt=True)
            for history in histories
        ]
        right = 0
        for history, chat, answer in zip(histories, conversations, complete(prompts), strict=True):
            history.append({"role": "assistant", "content": answer})
            right += number_of(answer) == chat[turn].value
        shares.append(right / len(conversations))
    return shares


def few_shot_accuracy(
    complete: Complete, shots: list[Problem], test_problems: list[Problem]
) -> float:
    """Return the share of right answers to plain completion prompts with worked examples before
    them."""
    head = "".join(f"Question: {shot.question}\nAnswer: {shot.answer}\n\n" for shot in shots)
    answers = complete(
        [f"{head}Question: {problem.question}\nAnswer:" for problem in test_problems]
    )
    right = sum(
        number_of(text) == problem.value
        for text, problem in zip(answers, test_problems, strict=True)
    )
    return right / len(test_problems)


def report(complete: Complete, tokenizer: Any, count: int) -> None:
    """Print the accuracy in chats of one turn, in chats of five turns, and few-shot."""
    rng, stream = random.Random("evaluation"), problems("test", seed=1)
    single = [[next(stream)] for _ in range(count)]
    print("one turn:", accuracy_by_turn(complete, tokenizer, single))
    multi = [conversation(rng, "test", turns=5) for _ in range(count // 2)]
    print("five turns, each:", accuracy_by_turn(complete, tokenizer, multi))
    shots, test_problems = ([next(stream) for _ in range(n)] for n in (5, count // 2))
    print("five shots:", few_shot_accuracy(complete, shots, test_problems))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, nargs="?", default=FOLDER)
    parser.add_argument("--url", help="server to query instead of running the model here")
    parser.add_argument("--count", type=int, default=200, help="problems asked in one turn")
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.folder)
    if args.url:
        report(partial(complete_there, args.url), tokenizer, args.count)
        return
    model = AutoModelForCausalLM.from_pretrained(args.folder, dtype=torch.float32)
    report(partial(complete_here, model, tokenizer), tokenizer, args.count)


if __name__ == "__main__":
    main()
