"""Captures of a Hugging Face model's attention: what fp8_kv does to your model, on your prompts.

    pip install torch transformers
    python capture_hf.py Qwen/Qwen2.5-0.5B-Instruct prompts/*.txt --out=captures
    fp8kvctl accuracy captures/*.safetensors --html=report.html

The model is what transformers loads: a name of the hub or a folder; of a .gguf file, the folder and
--gguf_file. Each text file is one prompt, of the kind and length that the model will serve. Its
last 32 tokens are taken for decode steps: of a few layers their Q, and K and V of all tokens, go
into a file for each layer, in the form of tests/data/captures/README.md. One forward pass a prompt;
no daemon.
"""

import argparse
import pathlib
import re
import sys

import torch
import transformers
from safetensors.torch import save_file

OFF_MAX = 0.05  # relative: a capture's attention beside the model's own, which rounds elsewhere
EAGER_MASK = transformers.masking_utils.ALL_MASK_ATTENTION_FUNCTIONS["eager"]
wanted = []  # layers
seen = {}  # layer: what the latest forward pass gave its attention, and got


def own_attention(module, query, key, value, mask, **options):
    """What the model would have used."""
    plain = not options.get("softcap") and options.get("s_aux") is None
    function = (transformers.AttentionInterface()["sdpa"] if plain else
                sys.modules[type(module).__module__].eager_attention_forward)
    return function(module, query, key, value, mask, **options)


def recorded_attention(module, query, key, value, mask, **options):
    """transformers' attention interface: [1, heads, tokens, head_dim]."""
    result = own_attention(module, query, key, value, mask, **options)
    if module.layer_idx not in wanted:
        return result
    if options.get("s_aux") is not None:
        sys.exit(f"layer {module.layer_idx} has attention sinks, which a capture cannot hold")
    if key.shape != value.shape:
        sys.exit(f"layer {module.layer_idx}: K {list(key.shape)} and V {list(value.shape)} differ, "
                 "which no daemon serves")
    rows = [x[0].transpose(0, 1).bfloat16().cpu() for x in (query, key, value)]
    seen[module.layer_idx] = {
        "rows": rows, "out": result[0][0], "sm_scale": options.get("scaling") or
        query.shape[3]**-0.5, "window": options.get("sliding_window") or 0,
        "softcap": options.get("softcap") or 0.0}
    return result


transformers.AttentionInterface.register("recorded", recorded_attention)
transformers.AttentionMaskInterface.register("recorded", EAGER_MASK)


def attend(layer, steps):
    """Float32 attention of the last steps over the bf16 rows, [steps, q_heads, head_dim]."""
    q, k, v = (x.float() for x in layer["rows"])
    tokens, kv_heads, head_dim = k.shape
    grouped = q[-steps:].view(steps, kv_heads, -1, head_dim)
    scores = torch.einsum("shgd,thd->shgt", grouped, k) * layer["sm_scale"]
    if layer["softcap"]:
        scores = layer["softcap"] * torch.tanh(scores / layer["softcap"])
    behind = torch.arange(tokens - steps, tokens)[:, None] - torch.arange(tokens)
    hidden = (behind < 0) | (behind >= (layer["window"] or tokens))
    weights = scores.masked_fill(hidden[:, None, None], -torch.inf).softmax(-1)
    return torch.einsum("shgt,thd->shgd", weights, v).reshape(steps, -1, head_dim)


def capture(number, layer, ids, steps, names):
    """Tensors and metadata of one layer's file."""
    out = attend(layer, steps)
    own = layer["out"][-steps:].float().cpu().reshape(out.shape)
    off = float((out - own).norm() / own.norm())
    if not off <= OFF_MAX:
        sys.exit(f"layer {number}: attention over its Q, K and V is not what the model computes "
                 f"(off by {off:.3f}): it is of a kind that fp8kvd does not serve")
    q, k, v = layer["rows"]
    tensors = {"q": q[-steps:], "k": k, "v": v, "out": out, "token_ids": ids.int(),
               "positions": torch.arange(len(k) - steps, len(k), dtype=torch.int32)}
    metadata = {
        **names, "layer": number, "tokens": len(k), "prefill_tokens": len(k) - steps,
        "steps": steps, "q_heads": q.shape[1], "kv_heads": k.shape[1], "head_dim": k.shape[2],
        **{name: layer[name] for name in ("sm_scale", "window", "softcap")}}
    return ({name: tensor.contiguous() for name, tensor in tensors.items()},
            {name: str(value) for name, value in metadata.items()})


def chosen_layers(text, count):
    """"3,7", "all", or by default eight over the whole depth."""
    if text == "all":
        return range(count)
    if text:
        return [int(number) for number in text.split(",")]
    return sorted({round(i * (count - 1) / 7) for i in range(8)})


def prompts(paths, tokenizer, tokens, steps):
    """Name and token ids of each."""
    for path in paths:
        ids = tokenizer(path.read_text(), return_tensors="pt").input_ids[0, :tokens]
        if len(ids) <= steps:
            sys.exit(f"{path} has {len(ids)} tokens, wanted are more than the {steps} of --steps, "
                     "and as many as a request of yours; give a longer text")
        yield path.stem, ids


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model")
    parser.add_argument("prompts", nargs="+", type=pathlib.Path)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("captures"))
    parser.add_argument("--layers", default="", help='"0,8,16" or "all"; default: 8 of them')
    parser.add_argument("--tokens", type=int, default=1532, help="of a prompt, at most")
    parser.add_argument("--steps", type=int, default=32, help="its last tokens, as decode steps")
    parser.add_argument("--gguf_file")
    options = parser.parse_args()
    source = {"gguf_file": options.gguf_file} if options.gguf_file else {}
    tokenizer = transformers.AutoTokenizer.from_pretrained(options.model, **source)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        options.model, dtype="auto", attn_implementation="recorded", **source).eval()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = model.to(device)
    wanted.extend(chosen_layers(options.layers,
                                model.config.get_text_config().num_hidden_layers))
    name = (options.gguf_file or options.model).removesuffix(".gguf").rstrip("/").split("/")[-1]
    name = re.sub(r"\W+", "_", name)
    options.out.mkdir(parents=True, exist_ok=True)
    for text, ids in prompts(options.prompts, tokenizer, options.tokens, options.steps):
        seen.clear()
        with torch.no_grad():
            model(ids[None].to(device), use_cache=False, logits_to_keep=1)
        for number in wanted:
            if number not in seen:
                sys.exit(f"layer {number} did not come through transformers' AttentionInterface; "
                         f"seen were {sorted(seen)}")
            tensors, metadata = capture(number, seen[number], ids, options.steps,
                                        {"model": name, "text": text})
            path = options.out / f"{name}_{text}_layer{number:02d}.safetensors"
            save_file(tensors, path, metadata)
            print(path)
    print(f"now: fp8kvctl accuracy {options.out}/*.safetensors --html=report.html")


if __name__ == "__main__":
    main()
