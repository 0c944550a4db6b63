"""The attention of an engine's decode steps, done by a daemon.

    python remote_decode.py 127.0.0.1:50051 [MODEL]

A real engine computes q, k and v from each layer's input and goes on with its out; here they are
made up, and so one layer need not wait for the one before: all of a step's are in flight at once.
In the end the answers are compared with the same attention computed here.
"""

import sys
import time

import numpy as np

import fp8kvd

PROMPTS, STEPS = (200, 3, 77), 16  # tokens of each sequence of the batch


def rows(*shape):
    """Floats that are bf16 already, so that the comparison in the end sees no rounding."""
    return (np.random.default_rng(sum(shape)).normal(0, 16, shape).round() / 16).astype(np.float32)


def relative_error(model, q, out, prompts, k, v):
    """Of the last step's out against the format's own reference, on the tokens that were sent."""
    cache = fp8kvd.Fp8KVCache(len(prompts), model.kv_heads, model.head_dim)
    for index, (prompt_k, prompt_v) in enumerate(prompts):
        cache.append(index, prompt_k, prompt_v)
        for _ in range(STEPS):
            cache.append(index, k[index:index + 1], v[index:index + 1])
    want = fp8kvd.fp8_kv_attention(q, cache, sm_scale=model.sm_scale)
    return np.linalg.norm(out - want) / np.linalg.norm(want)


def main(target, name=""):
    with fp8kvd.Client(target) as client:
        model = client.server_info().model(name)
        # Room for all tokens is reserved, so that no append can fail for want of it.
        seqs = client.create_sequences(len(PROMPTS), model.name,
                                       expected_tokens=max(PROMPTS) + STEPS)
        prompts = []  # the last layer's
        for seq, tokens in zip(seqs, PROMPTS):  # what the engine has attended to by itself
            prompt = rows(model.layers, tokens, model.kv_heads, model.head_dim)
            seq.append(prompt, prompt / 2)
            prompts.append((prompt[-1], prompt[-1] / 2))
        q = rows(len(seqs), model.q_heads, model.head_dim)
        k, v = (rows(len(seqs), model.kv_heads, model.head_dim) for _ in range(2))
        start = time.perf_counter()
        with client.decode_stream() as stream:
            for _ in range(STEPS):
                futures = [stream.submit(seqs, q, k, v, layer=layer)
                           for layer in range(model.layers)]
                outs = [future.result().out for future in futures]
        layer_us = (time.perf_counter() - start) * 1e6 / STEPS / model.layers
        error = relative_error(model, q, outs[-1], prompts, k, v)
        client.free_sequences(seqs)
    print(f"{model.name}: {len(seqs)} sequences, {layer_us:.0f} us a layer, "
          f"error {error:.1e} against the format's reference")


if __name__ == "__main__":
    main(*sys.argv[1:])
