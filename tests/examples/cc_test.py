"""find_package(fp8kvd): installs the C++ client, builds and runs examples/ as a consumer does."""

import pathlib
import subprocess
import sys
import tempfile
import unittest

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "e2e_py"))
from daemon_process import BIN, ROOT, DaemonProcess  # noqa: E402

CONFIG = """
models { name: "small" layers: 3 q_heads: 6 kv_heads: 2 head_dim: 64
         expected_seqs: 1 expected_tokens: 256 precision: bf16 }
"""


class Consumer(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory(prefix="fp8kvd_consumer_")
        cls.addClassCleanup(folder.cleanup)
        cls.prefix, cls.build = pathlib.Path(folder.name, "prefix"), pathlib.Path(folder.name, "b")
        cls.cmake("--install", BIN.parent, "--component", "client", "--prefix", cls.prefix)
        cls.cmake("-S", ROOT / "examples", "-B", cls.build, "-G", "Ninja",
                  f"-DCMAKE_PREFIX_PATH={cls.prefix}")
        cls.cmake("--build", cls.build)
        cls.daemon = DaemonProcess(CONFIG)
        cls.addClassCleanup(cls.daemon.stop)

    @staticmethod
    def cmake(*arguments):
        ran = subprocess.run(["cmake", *arguments], stdout=subprocess.PIPE,
                             stderr=subprocess.STDOUT, text=True, timeout=200)
        if ran.returncode != 0:
            raise AssertionError(f"cmake {arguments}:\n{ran.stdout}")

    def run_example(self, *arguments):
        return subprocess.run([self.build / "remote_decode", *arguments], capture_output=True,
                              text=True, timeout=60)

    def test_it_decodes(self):
        ran = self.run_example(self.daemon.address)
        self.assertEqual(ran.returncode, 0, ran.stderr)
        self.assertRegex(ran.stdout, r"\nsmall: 216 tokens, \d+ us a layer, largest error ")

    def test_it_says_what_is_wrong(self):
        ran = self.run_example(self.daemon.address, "large")
        self.assertEqual(ran.returncode, 1)
        self.assertIn("the daemon has no model large", ran.stderr)

    def test_nothing_but_the_client_is_installed(self):
        found = {str(path.relative_to(self.prefix)) for path in self.prefix.rglob("*")
                 if path.is_file()}
        self.assertIn("include/fp8kvd/client/cc/client.h", found)
        self.assertFalse([path for path in found if path.endswith((".pb.h", "core.h"))], found)


if __name__ == "__main__":
    unittest.main()
