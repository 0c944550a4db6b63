"""examples/hf_chat.py with SmolLM2, as a person at a terminal uses it."""

import re
import subprocess
import sys
import unittest

from hf_case import Case, ROOT
from package import SITE
from real_models import gguf_of


class Chat(Case):
    @classmethod
    def models(cls, folder):
        text = (ROOT / "deploy/example.textproto").read_text()
        return text[text.index("models {"):]

    def test_two_questions_in_one_cache(self):
        path = gguf_of("smollm2_135m", "")
        ran = subprocess.run(
            [sys.executable, ROOT / "examples/hf_chat.py", self.daemon.address, "smollm2_135m_fp8",
             path.parent, f"--gguf_file={path.name}", "--max_new_tokens=16"],
            env={"PYTHONPATH": SITE, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
            text=True, capture_output=True,
            input="What is the capital of France?\nAnd of Italy?\n\n", timeout=200)
        self.assertEqual(ran.returncode, 0, ran.stderr)
        self.assertIn("Paris", ran.stdout)
        self.assertIn("Rome", ran.stdout)
        tokens, kib = map(int, re.search(r"(\d+) tokens, (\d+) KiB", ran.stdout).groups())
        self.assertGreater(tokens, 40)
        self.assertEqual(kib, -(-tokens // 64) * 64 * 30 * 2 * 3 * (64 + 4) // 1024)


if __name__ == "__main__":
    unittest.main()
