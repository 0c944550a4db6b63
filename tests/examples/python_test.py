"""The Python examples against built daemons."""

import pathlib
import subprocess
import sys
import unittest

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "py"))
from package import ROOT, SITE  # noqa: E402  # builds and installs the wheel

from daemon_process import DaemonProcess  # noqa: E402

CONFIG = """
policy { allow_fp8_kv: true }
models { name: "small" layers: 3 q_heads: 6 kv_heads: 2 head_dim: 64
         expected_seqs: 8 expected_tokens: 640 precision: fp8_kv }
"""


class Examples(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.daemons = [DaemonProcess(CONFIG) for _ in range(2)]
        for daemon in cls.daemons:
            cls.addClassCleanup(daemon.stop)

    def run_example(self, name, *arguments):
        ran = subprocess.run([sys.executable, ROOT / "examples" / name, *arguments],
                             env={"PYTHONPATH": SITE}, capture_output=True, text=True, timeout=60)
        self.assertEqual(ran.returncode, 0, ran.stderr)
        return ran.stdout

    def test_remote_decode(self):
        said = self.run_example("remote_decode.py", self.daemons[0].address)
        self.assertRegex(said, r"^small: 3 sequences, \d+ us a layer, error ")
        self.assertLess(float(said.split("error ")[1].split()[0]), 2e-3)

    def test_prefix_sharing(self):
        """500 tokens are 8 pages; each of 3 forks has its own last page."""
        said = self.run_example("prefix_sharing.py", self.daemons[0].address)
        self.assertRegex(said, r"name 32 pages, 11 are kept$")

    def test_context_parallel(self):
        said = self.run_example("context_parallel.py", *(d.address for d in self.daemons))
        self.assertRegex(said, r"^170 \+ 130 tokens on two daemons: ")
        self.assertLess(float(said.split(": ")[1].split()[0]), 2e-3)


if __name__ == "__main__":
    unittest.main()
