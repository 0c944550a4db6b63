"""README.md's Python call, as a reader would paste it, against the daemon that README.md starts;
and that the files which the documents name are there."""

import re
import shlex
import subprocess
import sys
import unittest

from daemon_process import BIN, ROOT, DaemonProcess

sys.path.append(str(ROOT / "tests/py"))
import package  # noqa: E402  # builds and installs the wheel, as pip does from client/python

README = (ROOT / "README.md").read_text()


def block(language):
    return re.search(rf"<!-- tests/e2e_py/readme_test.py .*?```{language}\n(.*?)```", README,
                     re.DOTALL).group(1)


class Readme(unittest.TestCase):
    def test_the_call_works_when_pasted(self):
        serve, install, python = block("sh").splitlines()
        self.assertEqual(serve, "build/release/bin/fp8kvd --config=deploy/example.textproto &")
        self.assertTrue(install.endswith("build/py/bin/pip install ./client/python"), install)
        self.assertEqual(python, "build/py/bin/python")
        daemon = DaemonProcess((ROOT / "deploy/example.textproto").read_text())
        try:
            call = block("python").replace("127.0.0.1:50051", daemon.address)
            self.assertLessEqual(len(call.splitlines()), 10)
            ran = subprocess.run([sys.executable, "-c", call], env={"PYTHONPATH": package.SITE},
                                 capture_output=True, text=True, timeout=60)
            self.assertEqual(ran.returncode, 0, ran.stderr)
            self.assertTrue(0.1 < float(ran.stdout) < 10, ran.stdout)
        finally:
            daemon.stop()

    def test_the_plan_answers_what_its_table_says(self):
        words = shlex.split(re.search(r"^build/release/bin/(fp8kvctl plan .*)$", README,
                                      re.MULTILINE).group(1))
        rows = re.findall(r"^\| (\d+) x ([\d,]+) \| ([\d.]+) % \| ([\d.]+)x \| "
                          r"([\d.]+)x \|", README, re.MULTILINE)
        self.assertEqual(len(rows), 3)
        for batch, tokens, share, speedup, with_calls in rows:
            words = [re.sub(r"--batch=\d+", f"--batch={batch}", word) for word in words]
            words = [re.sub(r"--tokens=\d+", f"--tokens={tokens.replace(',', '')}", word)
                     for word in words]
            ran = subprocess.run([BIN / words[0], *words[1:]], cwd=ROOT, check=True,
                                 capture_output=True, text=True, timeout=60)
            self.assertRegex(ran.stdout, rf"cache share +{share} %")
            self.assertRegex(ran.stdout, rf"speed-up of the step +{speedup}x")
            self.assertRegex(ran.stdout, rf"speed-up of the step with .* a layer +{with_calls}x")

    def test_every_path_named_exists(self):
        for document in ("README.md", "docs/architecture.md", "docs/semantics.md",
                         "docs/integration.md", "examples/README.md"):
            text = (ROOT / document).read_text()
            folder = (ROOT / document).parent
            for link in re.findall(r"\]\(([^)#]+)\)", text):
                self.assertTrue((folder / link).exists(), f"{document} links to {link}")
            for name in re.findall(r"`((?:[\w.]+/)+[\w.]*|[\w/]+\.(?:h|cc|txt|proto))`", text):
                self.assertTrue((ROOT / name).exists(), f"{document} names {name}")


if __name__ == "__main__":
    unittest.main(verbosity=2)
