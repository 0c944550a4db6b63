"""deploy/quickstart where everything is installed and built: what it prints, how long it takes, how
it ends; and what it makes of a machine without nvcc."""

import json
import os
import pathlib
import re
import shutil
import subprocess
import tempfile
import time
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
CAPTURES = ROOT / "tests/data/captures"
SECOND_RUN_SECONDS_MAX = 60

# Stands for cmake where a test wants to say what it found: configures with this line, builds two
# steps, of which the binaries are there already.
CMAKE_STUB = """#!/bin/sh
case "$1" in
  --preset) echo '-- CUDA backend: {backend}' ;;
  --build) printf '[1/2] one\\n[2/2] two\\n'; exit {build_status} ;;
esac
"""


class Ran:
    """One run of deploy/quickstart."""

    def __init__(self, *arguments, stubs=None):
        path = os.environ["PATH"]
        start = time.monotonic()
        done = subprocess.run([ROOT / "deploy/quickstart", *arguments], stdin=subprocess.DEVNULL,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                              env=os.environ | {"PATH": f"{stubs}:{path}" if stubs else path},
                              timeout=100, check=False)
        self.seconds = time.monotonic() - start
        self.status = done.returncode
        self.output = done.stdout
        self.last_line = done.stdout.rstrip("\n").split("\n")[-1]

    def rows(self):
        """The table: (capture, precision) -> whether the line says that its bound was held."""
        found = re.findall(r"^(\S+)\.safetensors +1532 +(bf16|fp8_kv) +[\d.e-]+ +"
                           r"[\d.]+ to [\d.]+ +(yes|NO) +[\d.]+ MiB +\d+ +[\d.]+ +[\d.]+$",
                           self.output, re.MULTILINE)
        return {(capture, precision): held == "yes" for capture, precision, held in found}


class Quickstart(unittest.TestCase):
    def setUp(self):
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="fp8kvd_test_"))
        self.addCleanup(shutil.rmtree, self.folder, ignore_errors=True)

    def stub_cmake(self, backend, build_status=0):
        stub = self.folder / "cmake"
        stub.write_text(CMAKE_STUB.format(backend=backend, build_status=build_status))
        stub.chmod(0o755)
        return self.folder

    def test_a_second_run_is_quick_and_ends_with_the_verdict(self):
        ran = Ran()
        self.assertEqual(ran.status, 0, ran.output)
        self.assertLess(ran.seconds, SECOND_RUN_SECONDS_MAX)
        self.assertEqual(ran.last_line,
                         "accuracy contract held: 6 of 6 replays within their bounds")
        captures = [path.stem for path in CAPTURES.glob("*.safetensors")]
        self.assertEqual(ran.rows(), {(capture, precision): True for capture in captures
                                      for precision in ("bf16", "fp8_kv")}, ran.output)
        self.assertRegex(ran.output, r"capture +tokens +precision +rel\. L2 +allowed +held +cache +"
                                     r"layers +p50 ms +p99 ms")
        for progress in ("installing", "configuring", "building", "starting", "replaying"):
            self.assertIn(progress, ran.output)

    def test_a_broken_contract_is_the_last_line_and_the_exit_status(self):
        captures = self.folder / "captures"
        shutil.copytree(CAPTURES, captures)
        errors = json.loads((captures / "smollm2_text_a_errors.json").read_text())
        errors["per_layer"]["decode"]["16"]["row"]["op"] *= 1.05  # 2 % is allowed
        (captures / "smollm2_text_a_errors.json").write_text(json.dumps(errors))
        self.break_outputs(captures / "gemma3_text_a_layer10.safetensors")
        ran = Ran(f"--captures={captures}", stubs=self.stub_cmake("not built"))
        self.assertEqual(ran.status, 1, ran.output)
        self.assertEqual(ran.last_line,
                         "accuracy contract BROKEN: 3 of 6 replays within their bounds")
        self.assertEqual({row for row, held in ran.rows().items() if not held},
                         {("smollm2_text_a_layer16", "fp8_kv"),
                          ("gemma3_text_a_layer10", "bf16"), ("gemma3_text_a_layer10", "fp8_kv")})

    @staticmethod
    def break_outputs(path):
        """Negates every captured output: the sign is the highest bit of an F32."""
        data = bytearray(path.read_bytes())
        header_bytes = int.from_bytes(data[:8], "little")
        begin, end = json.loads(data[8:8 + header_bytes])["out"]["data_offsets"]
        for at in range(8 + header_bytes + begin + 3, 8 + header_bytes + end, 4):
            data[at] ^= 0x80
        path.write_bytes(data)

    def test_a_machine_without_nvcc_gets_a_cpu_only_daemon_and_is_told(self):
        ran = Ran(stubs=self.stub_cmake("not built (FP8KVD_CUDA=AUTO, no nvcc in use): CPU only"))
        self.assertEqual(ran.status, 0, ran.output)
        self.assertIn("no nvcc here: building a CPU-only daemon\n", ran.output)
        self.assertIn("building: 50 % (1 of 2)\n", ran.output)
        self.assertIn("building: 100 % (2 of 2)\n", ran.output)

    def test_a_machine_with_nvcc_is_told_so(self):
        ran = Ran(stubs=self.stub_cmake("/opt/bin/nvcc, architectures 90a"))
        self.assertIn("nvcc is here: the CUDA code is built too (/opt/bin/nvcc, architectures 90a)",
                      ran.output)
        self.assertNotIn("CPU-only", ran.output)

    def test_a_failed_build_is_the_last_line_and_the_exit_status(self):
        ran = Ran(stubs=self.stub_cmake("not built", build_status=3))
        self.assertEqual(ran.status, 1)
        self.assertEqual(ran.last_line, "accuracy contract not checked: the build failed; "
                                        "the whole log is build/quickstart/build.log")

    def test_a_folder_without_captures_is_no_success(self):
        ran = Ran(f"--captures={self.folder}", stubs=self.stub_cmake("not built"))
        self.assertEqual(ran.status, 1)
        self.assertTrue(ran.last_line.startswith("accuracy contract not checked: "), ran.output)

    def test_an_unknown_argument_is_refused(self):
        ran = Ran("--capture=x")
        self.assertEqual((ran.status, ran.last_line),
                         (2, "unknown argument '--capture=x'; usage: deploy/quickstart "
                             "[--captures=FOLDER]"))


class Nvcc(unittest.TestCase):
    """cmake/cuda.cmake by itself, on a machine where no program is found."""

    def configure(self, choice):
        with tempfile.TemporaryDirectory(prefix="fp8kvd_test_") as folder:
            done = subprocess.run(
                ["cmake", f"-DFP8KVD_CUDA={choice}", f"-DCMAKE_FIND_ROOT_PATH={folder}",
                 "-DCMAKE_FIND_ROOT_PATH_MODE_PROGRAM=ONLY", "-P", ROOT / "cmake/cuda.cmake"],
                cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                timeout=60, check=False)
            return done.returncode, done.stdout

    def test_auto_without_it_builds_for_the_cpu_and_says_so(self):
        status, output = self.configure("AUTO")
        self.assertEqual(status, 0, output)
        self.assertIn("-- CUDA backend: not built (FP8KVD_CUDA=AUTO, no nvcc in use): CPU only\n",
                      output)

    def test_on_without_it_is_an_error_that_names_it(self):
        status, output = self.configure("ON")
        self.assertNotEqual(status, 0)
        self.assertIn("FP8KVD_CUDA=ON, but nvcc is neither on PATH", output)


if __name__ == "__main__":
    unittest.main(verbosity=2)
