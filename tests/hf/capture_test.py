"""examples/capture_hf.py on small random models, and what fp8kvctl accuracy says of its files."""

import json
import pathlib
import runpy
import subprocess
import sys
import tempfile
import unittest
from unittest import mock

from hf_case import ROOT, random_model, transformers
from package import BIN

import tokenizers
import torch
from safetensors.torch import load_file

import fp8kvd

TEXT = " ".join(f"w{i * i % 97}" for i in range(150))  # a word is a token


def save(model, folder):
    """As it lies on the hub, with a tokenizer of 97 words."""
    model.config._attn_implementation = "eager"
    model.save_pretrained(folder)
    words = {f"w{i}": i + 3 for i in range(97)}
    words["?"] = 0
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="?"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)


class Capture(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory(prefix="fp8kvd_capture_")
        cls.addClassCleanup(folder.cleanup)
        cls.folder = pathlib.Path(folder.name)
        (cls.folder / "text.txt").write_text(TEXT)
        cls.models = {}

    def run_script(self, name, *options):
        """As a shell would, with a model of that architecture; what it said before it gave up."""
        if name not in self.models:
            self.models[name] = random_model(name)
            save(self.models[name], self.folder / name)
        words = [self.folder / name, self.folder / "text.txt", f"--out={self.folder / 'captures'}",
                 "--tokens=100", "--steps=20", *options]
        with mock.patch.object(sys, "argv", ["capture_hf.py", *map(str, words)]):
            try:
                runpy.run_path(str(ROOT / "examples/capture_hf.py"), run_name="__main__")
            except SystemExit as given_up:
                return str(given_up.code)
        return ""

    def own_outputs(self, name):
        """What the model's own attention gives o_proj, by layer, [tokens, q_heads, head_dim]."""
        model, inputs = self.models[name], []
        hooks = [layer.self_attn.o_proj.register_forward_pre_hook(
            lambda _, given: inputs.append(given[0][0])) for layer in model.model.layers]
        model.set_attn_implementation("eager")
        ids = torch.tensor([[i * i % 97 + 3 for i in range(100)]])
        with torch.no_grad():
            model(ids, use_cache=False)
        for hook in hooks:
            hook.remove()
        return [out.reshape(100, 6, 64) for out in inputs]

    def test_a_capture_is_what_the_model_attends_to(self):
        # Gemma 2: windows in every other layer, a softcap, a scale of its own.
        self.assertEqual(self.run_script("gemma2", "--layers=all"), "")
        own = self.own_outputs("gemma2")
        files = sorted((self.folder / "captures").glob("gemma2_text_layer*.safetensors"))
        self.assertEqual([file.name[-14:-12] for file in files], ["00", "01", "02", "03"])
        for layer, file in enumerate(files):
            tensors = load_file(file)
            self.assertEqual(tensors["positions"].tolist(), list(range(80, 100)))
            off = (tensors["out"] - own[layer][80:]).norm() / own[layer][80:].norm()
            self.assertLess(off, 0.01)
        asked = subprocess.run([BIN / "fp8kvctl", "accuracy", "--json", *files],
                               capture_output=True, timeout=60)
        report = json.loads(asked.stdout)
        self.assertTrue(report["contract_held"], asked.stderr)
        for layer, said in enumerate(report["layers"]):
            tensors = load_file(files[layer])
            want = fp8kvd.measure_accuracy(
                tensors["q"], tensors["k"], tensors["v"], tensors["positions"].tolist(),
                sm_scale=32**-0.5, softcap=5.0, window=24 if layer % 2 == 0 else 0)
            self.assertAlmostEqual(said["op"], want.ways["row"].op, places=7)

    def test_what_cannot_be_captured_is_refused(self):
        self.assertIn("has 100 tokens, wanted are more than the 100 of --steps",
                      self.run_script("gemma2", "--steps=100"))
        self.assertIn("layer 0 has attention sinks", self.run_script("gpt_oss"))
        self.assertIn("layer 9 did not come through", self.run_script("gemma2", "--layers=9"))


if __name__ == "__main__":
    unittest.main()
