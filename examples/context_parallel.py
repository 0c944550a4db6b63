"""One sequence's tokens on two daemons, which attend side by side; the answers are merged by lse.

    python context_parallel.py 127.0.0.1:50051 127.0.0.1:50061 [MODEL]

The first daemon has the older tokens, the second the newer ones and each new one. A daemon knows
nothing of the other: positions count what it has itself, since RoPE is in q and k already. It
answers with the attention over its own tokens and with the logarithm of the softmax's denominator,
which is all that a merge needs. (For layers without a window. Of layers with sinks one of the two
gets omit_sinks=True.)
"""

import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np

import fp8kvd

TOKENS, FIRST, STEPS = 300, 170, 8


def rows(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def merge(replies):
    """out weighted by the denominators: exp(lse)."""
    lse = np.stack([reply.lse for reply in replies])
    weights = np.exp(lse - lse.max(axis=0))
    weights /= weights.sum(axis=0)
    return sum(weight[..., None] * reply.out for weight, reply in zip(weights, replies))


def main(older, newer, name=""):
    with fp8kvd.Client(older) as first, fp8kvd.Client(newer) as second, \
            ThreadPoolExecutor(2) as pool:
        model = first.server_info().model(name)
        k, v = (rows(seed, TOKENS + STEPS, model.kv_heads, model.head_dim) for seed in (1, 2))
        room = {"expected_tokens": TOKENS + STEPS}
        with first.create_sequence(model.name, **room) as old, \
                second.create_sequence(model.name, **room) as new, \
                second.create_sequence(model.name, **room) as whole:
            old.append(k[:FIRST], v[:FIRST], layer=0)
            new.append(k[FIRST:TOKENS], v[FIRST:TOKENS], layer=0)
            whole.append(k[:TOKENS], v[:TOKENS], layer=0)  # only to compare
            errors = []
            for token in range(TOKENS, TOKENS + STEPS):
                q, here = rows(token, 1, model.q_heads, model.head_dim), slice(token, token + 1)
                ask = [pool.submit(old.decode, q, layer=0, want_lse=True),  # attends only
                       pool.submit(new.decode, q, k[here], v[here], layer=0, want_lse=True)]
                out = merge([future.result() for future in ask])
                want = whole.decode(q, k[here], v[here], layer=0).out
                errors.append(np.linalg.norm(out - want) / np.linalg.norm(want))
    print(f"{FIRST} + {TOKENS - FIRST} tokens on two daemons: {max(errors):.1e} off from "
          f"{TOKENS} on one")


if __name__ == "__main__":
    main(*sys.argv[1:])
