"""Perplexity and greedy agreement of a real model whose KV cache is on a daemon, bf16 and fp8_kv.

    build/release/bin/fp8kvd --config=deploy/example.textproto &
    python bench/accuracy/perplexity.py --model=smollm2 --out=FILE.json

Needs the packages of tests/hf/requirements.txt and models.txt, and fp8kvd.

The model reads 1,000 tokens of the text of its captures at once and 500 more one by one, whatever
it would have said itself; each of those attends through the daemon. Then it goes on for 32 tokens
greedily. All of its own arithmetic is float32, so that what is measured comes from where K and V
are. The same without a daemon, by eager float32 attention, is what both are compared with.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import models
import numpy as np
import torch
import transformers

import fp8kvd
from fp8kvd import hf

PROMPT, STEPS, GREEDY = 1000, 500, 32
DAEMON_MODELS = {"smollm2": "smollm2_135m", "gemma3": "gemma3_270m"}


def forced(model: Any, ids: torch.Tensor, cache: Any, argument: str) -> torch.Tensor:
    """Hidden states of the last prompt token and the forced ones, [STEPS + 1, hidden]."""
    named = {argument: cache, "use_cache": True}
    states = [model.model(ids[:, :PROMPT], **named).last_hidden_state[0, -1:]]
    for at in range(PROMPT, PROMPT + STEPS):
        states.append(model.model(ids[:, at:at + 1], **named).last_hidden_state[0])
    return torch.cat(states)


def greedy(model: Any, last: torch.Tensor, cache: Any, argument: str) -> tuple[list[int], float]:
    """The next tokens, and the least margin between the best two logits."""
    tokens, margin = [], float("inf")
    for _ in range(GREEDY):
        best = model.lm_head(last).topk(2, dim=-1)
        margin = min(margin, float(best.values[0, 0] - best.values[0, 1]))
        tokens.append(int(best.indices[0, 0]))
        named = {argument: cache, "use_cache": True}
        last = model.model(torch.tensor([[tokens[-1]]]), **named).last_hidden_state[0]
    return tokens, margin


def run(model: Any, ids: torch.Tensor, cache: Any) -> dict[str, Any]:
    """What one cache gives: hidden states [STEPS, hidden], then greedy tokens."""
    argument = hf.cache_argument(model)
    with torch.no_grad():
        states = forced(model, ids, cache, argument)
        tokens, margin = greedy(model, states[-1:], cache, argument)
    return {"states": states[:-1], "greedy": tokens, "margin": margin}


def tokenwise(model: Any, got: dict[str, Any], exact: dict[str, Any], targets: torch.Tensor
              ) -> np.ndarray[Any, Any]:
    """[STEPS, 4]: loss, exact loss, KL, and whether the best token is the same."""
    rows = []
    with torch.no_grad():
        for at in range(STEPS):  # a vocabulary of 262,144 is large enough for one token
            logs, right = (torch.log_softmax(model.lm_head(x["states"][at]).double(), -1)
                           for x in (got, exact))
            kl = (right.exp() * (right - logs)).sum()
            rows.append([float(-logs[targets[at]]), float(-right[targets[at]]), float(kl),
                         float(logs.argmax() == right.argmax())])
    return np.array(rows)


def compared(model: Any, got: dict[str, Any], exact: dict[str, Any], targets: torch.Tensor
             ) -> dict[str, Any]:
    """Numbers of a run beside the exact one's."""
    loss, exact_loss, kl, agree = tokenwise(model, got, exact, targets).T
    difference = loss - exact_loss
    same = [a == b for a, b in zip(got["greedy"], exact["greedy"])]
    return {
        "perplexity": float(np.exp(loss.mean())),
        "loss_difference": float(difference.mean()),
        "loss_difference_stderr": float(difference.std(ddof=1) / np.sqrt(len(difference))),
        "kl_mean": float(kl.mean()), "kl_max": float(kl.max()),
        "top1_agreement": float(agree.mean()),
        "greedy_same": sum(same),
        "greedy_first_difference": same.index(False) if not all(same) else None,
    }


def main() -> None:
    """Runs a model three times and writes the numbers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=models.NAMES, required=True)
    parser.add_argument("--target", default="127.0.0.1:50051")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    model = models.load(args.model, "eager")
    ids = torch.tensor([models.token_ids(args.model)[:PROMPT + STEPS]])
    targets = ids[0, PROMPT:]
    exact = run(model, ids, transformers.DynamicCache(config=model.config))
    result: dict[str, Any] = {
        "model": args.model, "prompt": PROMPT, "steps": STEPS, "greedy": GREEDY,
        "greedy_margin_min": exact["margin"],
        "perplexity_eager_float32": compared(model, exact, exact, targets)["perplexity"]}
    with fp8kvd.Client(args.target) as client:
        info = client.server_info()
        result["device"] = info.device_name
        for precision in ("bf16", "fp8"):
            name = f"{DAEMON_MODELS[args.model]}_{precision}"
            with hf.attach(model, client, name) as attached, attached.cache() as cache:
                result[precision] = compared(model, run(model, ids, cache), exact, targets)
            print(args.model, precision, result[precision], flush=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
