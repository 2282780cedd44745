"""Local turns with a draft model, in addition to ``test_local_turns`` and ``test_admission``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any  # Any: requests of SGLang

import pytest
import torch

from current.environment import DRAFTS, MOONCAKE, SMALL, drafting
from current.test_local_turns import ADMITTED, LOCAL, Peers
from current.texts import text
from sglang.srt.runtime_context import get_spec
from sglang.srt.server_args import prepare_server_args

if TYPE_CHECKING:
    from current.decode import Decode

#: Draft attention reads the window and the first tokens. SGLang draws drafts, by what a CPU has.
DRAWN = (
    *("--speculative-draft-window-size", "64", "--speculative-draft-sink-size", "4"),
    "--speculative-use-rejection-sampling",
)
MULTINOMIAL = {"SGLANG_OPT_USE_GUMBEL_SAMPLE": "0"}
ADAPTIVE = (
    *("--speculative-adaptive", "--speculative-adaptive-config", "@steps"),
    *("--speculative-token-map", "@token_map"),
)


@pytest.fixture
def steps(tmp_path: Path) -> str:
    """The file of a configuration with which the number of steps soon changes."""
    slot = {"candidate_steps": [0, 1, 3], "warmup_batches": 2, "update_interval": 2}
    path = tmp_path / "steps.json"
    path.write_text(json.dumps({"1": slot}))
    return str(path)


@pytest.fixture
def token_map(tmp_path: Path) -> str:
    """The file of a map to half of the tokens."""
    torch.save(list(range(0, 600, 2)), tmp_path / "map.pt")
    return str(tmp_path / "map.pt")


def check_retracted(decode: Decode, new: int) -> set[int]:
    """Check the answers of ``new`` tokens to three local turns, of which one is retracted. Return
    the numbers of draft steps meanwhile."""
    decode.scheduler.lead_turns.peers = Peers()
    prompts = [text(80, seed) for seed in range(3)]
    expected = [decode.learn([prompt], new)[0] for prompt in prompts]
    rids = [decode.ask(prompt, new) for prompt in prompts]
    decode.step()
    steps = set[int]()
    decode.until(lambda: bool(steps.add(get_spec().speculative_num_steps)) or decode.ended(*rids))
    assert [decode.output(rid) for rid in rids] == expected
    assert {frames[-1] for frames in decode.frames} == {b"LOCAL"}, "all were computed here"
    assert sum(decode.requests[rid].retraction_count for rid in rids) > 0
    return steps


#: A tree of one step: the stand-in's kernels build no other, and on pages of one token.
TREE = (
    *("--speculative-algorithm", "EAGLE", "--speculative-draft-model-path", "@arithmetic"),
    *("--speculative-num-steps", "1", "--speculative-eagle-topk", "3"),
    *("--speculative-num-draft-tokens", "4", "--page-size", "1"),
)
NATIVE = {"SGLANG_NATIVE_MOVE_KV_CACHE": "1"}


@pytest.mark.server(*TREE, *SMALL, model="arithmetic", tokens=370, env=ADMITTED | NATIVE)
def test_a_tree_of_drafts(decode: Decode) -> None:
    """Guards against a first draft without its branches, or without the memory for them."""
    assert check_retracted(decode, 48) == {1}


@pytest.mark.parametrize(
    (),
    [
        pytest.param(
            marks=pytest.mark.server(*DRAFTS, *SMALL, tokens=384, env=ADMITTED), id="EAGLE"
        ),
        pytest.param(
            marks=pytest.mark.server(
                *drafting("@eagle3", "EAGLE3"),
                *(*DRAWN, *SMALL, *MOONCAKE),
                tokens=384,
                env=ADMITTED | MULTINOMIAL,
            ),
            id="EAGLE3, drawn drafts, mooncake",
        ),
    ],
)
def test_a_local_turn_that_was_retracted_resumes(decode: Decode) -> None:
    """Guards against a request without the input of its first draft: SGLang takes that from the
    metadata of the request's transfer, and a local turn has none."""
    assert check_retracted(decode, 48) == {3}


@pytest.mark.server(*DRAFTS, *ADAPTIVE, *SMALL, tokens=384, env=ADMITTED)
def test_the_number_of_steps_changes(decode: Decode) -> None:
    """Guards against a request that lacks memory for another step, or that joins or resumes without
    its first draft when there are no steps."""
    assert check_retracted(decode, 48) == {0, 1}


@pytest.mark.parametrize(
    (),
    [
        pytest.param(
            marks=pytest.mark.server(
                *(*drafting(f"@{family}", "NEXTN"), *SMALL, *backend),
                model=family,
                tokens=288,
                env=ADMITTED,
            ),
            id=", ".join((family, *backend[1:])),
        )
        for family, backend in (("deepseek_v3_nextn", MOONCAKE), ("glm4_moe_nextn", ()))
    ],
)
def test_heads_of_the_model(decode: Decode) -> None:
    """Guards against an MTP head (NEXTN) without the hidden state or the KV of a local turn."""
    assert check_retracted(decode, 24) == {3}


@pytest.mark.server(*drafting("@arithmetic"), model="arithmetic", env=LOCAL)
def test_a_local_turn_has_the_drafts_of_an_aggregated_server(decode: Decode) -> None:
    """Guards against draft KV that is not computed here: no answer would change, but fewer drafts
    would be accepted."""
    decode.scheduler.lead_turns.peers = Peers()
    prompt = text(200, 1)
    (answer,) = decode.learn([prompt], 40)
    second = [*prompt, *answer, *text(30, 2)]
    (expected,) = decode.learn([second], 40)
    aggregated = accepted(list(decode.requests.values())[-1])
    decode.finish(decode.ask(prompt, 40))
    rid = decode.ask(second, 40)
    decode.finish()
    assert decode.output(rid) == expected
    assert accepted(decode.requests[rid]) >= 0.9 * aggregated > 1.5


def accepted(req: Any) -> float:
    """Return the average number of accepted drafts in a step, of three."""
    return float(req.spec_num_correct_drafts / req.spec_verify_ct)


@pytest.mark.server()
@pytest.mark.parametrize("algorithm", ["DFLASH", "FROZEN_KV_MTP", "NGRAM", "STANDALONE", "UNO"])
def test_sglang_refuses_the_other_algorithms(model: str, algorithm: str) -> None:
    """Guards against an algorithm that SGLang comes to allow: no part was run with it."""
    side = "--disaggregation-mode", "decode", "--disaggregation-decode-enable-radix-cache"
    args = ("--model-path", model, "--device", "cpu", *side, "--speculative-algorithm", algorithm)
    with pytest.raises(ValueError, match="is incompatible with speculative decoding"):
        prepare_server_args([*args]).resolve_once()
