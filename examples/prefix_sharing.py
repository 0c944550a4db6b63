"""One prompt for many sequences: its K and V are sent and kept once.

    python prefix_sharing.py 127.0.0.1:50051 [MODEL]

The prompt's sequence is forked. A fork has the same pages; a page is copied only when one of its
owners writes into it, and of a prompt that can only be the last one.
"""

import sys

import numpy as np

import fp8kvd

PROMPT, FORKS, STEPS = 500, 3, 5


def rows(*shape):
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def main(target, name=""):
    with fp8kvd.Client(target) as client:
        model = client.server_info().model(name)
        with client.create_sequence(model.name, expected_tokens=PROMPT) as prompt:
            shape = model.layers, PROMPT, model.kv_heads, model.head_dim
            prompt.append(rows(*shape), rows(*shape))
            answers = client.fork_sequences(prompt, FORKS, expected_tokens=PROMPT + STEPS)
            q = rows(FORKS, model.q_heads, model.head_dim)
            for step in range(STEPS):
                k, v = (rows(FORKS, model.kv_heads, model.head_dim) + step for _ in range(2))
                for layer in range(model.layers):
                    client.decode(answers, q, k, v, layer=layer)
            infos = client.stat_sequences([prompt, *answers])
            named = sum(info.pages for info in infos)
            kept = sum(group.pages_used for group in client.server_info().model(name).groups)
            client.free_sequences(answers)
    print(f"{FORKS} answers to one prompt of {PROMPT} tokens: their block tables name {named} "
          f"pages, {kept} are kept")


if __name__ == "__main__":
    main(*sys.argv[1:])
