"""A conversation with a Hugging Face model whose KV cache is on a daemon.

    pip install './client/python[hf]'
    python hf_chat.py 127.0.0.1:50051 smollm2_135m_bf16 HuggingFaceTB/SmolLM2-135M-Instruct

The second argument is the daemon's name for the model, the third what transformers loads: a name
of the hub or a folder; of a .gguf file, the folder and --gguf_file. A line is a question, and an
empty line or the end of the input ends it. The cache lasts as long as the conversation: each
question sends only its own tokens.
"""

import argparse
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer

import fp8kvd
from fp8kvd import hf


def questions():
    """The lines of the input until an empty one."""
    while True:
        print("> ", end="", flush=True)
        line = sys.stdin.readline().strip()
        if not line:
            return
        yield line


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("target")
    parser.add_argument("name")
    parser.add_argument("model")
    parser.add_argument("--gguf_file")
    parser.add_argument("--max_new_tokens", type=int, default=200)
    options = parser.parse_args()
    source = {"gguf_file": options.gguf_file} if options.gguf_file else {}
    tokenizer = AutoTokenizer.from_pretrained(options.model, **source)
    device, dtype = (("cuda", torch.bfloat16) if torch.cuda.is_available() else
                     ("cpu", torch.float32))
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype, **source).to(device)
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)

    said = []
    with fp8kvd.Client(options.target) as client, \
            hf.attach(model, client, options.name) as attached, attached.cache() as cache:
        for question in questions():
            said.append({"role": "user", "content": question})
            inputs = tokenizer.apply_chat_template(said, add_generation_prompt=True,
                                                   return_tensors="pt", return_dict=True)
            inputs = inputs.to(device)
            tokens = model.generate(**inputs, max_new_tokens=options.max_new_tokens,
                                    streamer=streamer, **{attached.cache_argument: cache})
            answer = tokens[0, inputs["input_ids"].shape[1]:]
            said.append({"role": "assistant",
                         "content": tokenizer.decode(answer, skip_special_tokens=True)})
        if cache.sequences:
            info = cache.sequences[0].stat()
            print(f"{info.seq_lens[0]} tokens, {info.bytes >> 10} KiB on the daemon")


if __name__ == "__main__":
    main()
