"""What the tests of fp8kvd.hf share: which transformers, small random models, a daemon for them."""

import os
import pathlib
import sys
import tempfile
import time
import unittest
import warnings

if os.environ.get("FP8KVD_TRANSFORMERS") == "4":  # else the environment's own, the current one
    sys.path.insert(0, str(pathlib.Path(sys.prefix) / "transformers4"))
os.environ["HF_HUB_OFFLINE"] = "1"
sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "py"))
from package import ROOT  # noqa: E402  # installs fp8kvd

import torch  # noqa: E402
import transformers  # noqa: E402

import fp8kvd  # noqa: E402
from daemon_process import DaemonProcess  # noqa: E402
from fp8kvd import hf  # noqa: E402, F401

torch.set_num_threads(1)  # the models are small, and the daemon runs beside them
VOCABULARY = 199
_SMALL = dict(vocab_size=VOCABULARY, hidden_size=96, intermediate_size=128, num_hidden_layers=4,
              num_attention_heads=6, num_key_value_heads=2, head_dim=64, pad_token_id=0,
              bos_token_id=1, eos_token_id=2, max_position_embeddings=1024, initializer_range=0.2)
CONFIGS = {  # class and what is not as in _SMALL
    "llama": (transformers.LlamaConfig, {}),
    "qwen3": (transformers.Qwen3Config, {}),
    "mistral": (transformers.MistralConfig, {"sliding_window": 24}),
    "gemma2": (transformers.Gemma2Config, {
        "sliding_window": 24, "query_pre_attn_scalar": 32, "attn_logit_softcapping": 5.0}),
    # All experts take part: which of them do would hang on the last bits.
    "gpt_oss": (transformers.GptOssConfig, {
        "sliding_window": 24, "num_local_experts": 3, "num_experts_per_tok": 3}),
}


def small_config(name, **changes):
    make, own = CONFIGS[name]
    return make(**{**_SMALL, **own, **changes})


def random_model(name, seed=0, **changes):
    """Of that architecture, float32, with weights large enough that attention matters."""
    torch.manual_seed(seed)
    config = small_config(name, **changes)
    config._attn_implementation = "rounded"
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if key.endswith("sinks"):
                weight.normal_(1.0, 1.0)
    return model


def rounded_attention(module, query, key, value, attention_mask, **options):
    """The model's own eager attention on what a daemon of bf16 precision would see of it: Q, K and
    V rounded, but for a prompt, which fp8kvd.hf attends to before it leaves."""
    eager = sys.modules[type(module).__module__].eager_attention_forward
    if query.shape[2] < key.shape[2] or key.shape[2] == 1:
        query, key, value = (x.bfloat16().float() for x in (query, key, value))
    return eager(module, query, key, value, attention_mask, **options)


transformers.AttentionInterface.register("rounded", rounded_attention)
transformers.AttentionMaskInterface.register(
    "rounded", transformers.masking_utils.ALL_MASK_ATTENTION_FUNCTIONS["eager"])


def describe(name, config, folder, precision, seqs=24, tokens=256):
    """The textproto of a daemon's model made from a transformers configuration."""
    path = pathlib.Path(folder) / f"{name}.json"
    config.to_json_file(path, use_diff=False)
    return (f'models {{ name: "{name}_{precision}" hf_config: "{path}" expected_seqs: {seqs} '
            f'expected_tokens: {tokens} precision: {precision} }}\n')


def tokens_of(*shape, seed=0):
    return torch.randint(3, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


class Case(unittest.TestCase):
    """A daemon that has the models of `described`, and a client."""

    precisions = ("bf16",)
    names = tuple(CONFIGS)

    @classmethod
    def setUpClass(cls):
        warnings.simplefilter("error", DeprecationWarning)
        folder = tempfile.TemporaryDirectory(prefix="fp8kvd_hf_")
        cls.addClassCleanup(folder.cleanup)
        cls.daemon = DaemonProcess("policy { allow_fp8_kv: true }\n"
                                   "cache { poison_freed_pages: true }\n" + cls.models(folder.name))
        cls.addClassCleanup(cls.daemon.stop)
        cls.client = fp8kvd.Client(cls.daemon.address)
        cls.addClassCleanup(cls.client.close)

    @classmethod
    def models(cls, folder):
        return "".join(describe(name, small_config(name), folder, precision)
                       for name in cls.names for precision in cls.precisions)

    def until(self, happened):
        deadline = time.monotonic() + 20
        while not happened():
            self.assertLess(time.monotonic(), deadline)

    def tearDown(self):
        self.assertEqual(self.client.list_sequences(), [], "a cache was not freed")
