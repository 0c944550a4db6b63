"""docs/operations.md: its commands run, its table is what the daemon computes, every alert is in
it, and it names no file, option or link that is not there."""

import os
import pathlib
import re
import shutil
import subprocess
import tempfile
import unittest

import tools
from daemon_process import BIN, DaemonProcess
from tools import DEPLOY, ROOT, run

TEXT = (ROOT / "docs/operations.md").read_text()
METRICS = (ROOT / "server/ops/metrics.cc").read_text()


class Commands(unittest.TestCase):
    """The `sh` blocks, in order, with a daemon of deploy/example.textproto on ports of its own."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="fp8kvd_operations_")
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        for name in ("tests", "deploy"):
            (self.folder / name).symlink_to(ROOT / name)
        shutil.copy(DEPLOY / "example.textproto", self.folder / "fp8kvd.textproto")
        self.http = f"127.0.0.1:{tools.free_port()}"
        self.daemon = DaemonProcess((DEPLOY / "example.textproto").read_text(),
                                    http_address=self.http)
        self.addCleanup(self.daemon.stop)

    def test_they_run_as_they_stand(self):
        blocks = re.findall(r"^```sh\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
        self.assertGreater(len(blocks), 7)
        path = f"{BIN}:{os.environ['PATH']}:/usr/sbin"
        for block in blocks:
            commands = (block.replace("/etc/fp8kvd/fp8kvd.textproto", "fp8kvd.textproto")
                        .replace("127.0.0.1:50051", self.daemon.address)
                        .replace("127.0.0.1:50052", self.http))
            ran = subprocess.run(["bash", "-euo", "pipefail", "-c", commands], cwd=self.folder,
                                 env={**os.environ, "PATH": path}, timeout=60, text=True,
                                 stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
            self.assertEqual(ran.returncode, 0, f"{block}\n{ran.stdout}")
        hashes = (self.folder / "tokens").read_text()
        self.assertRegex(hashes, r"^team-a [0-9a-f]{64}\n$")
        self.tokens_are_taken()

    def tokens_are_taken(self):
        """A daemon starts with the token file that the last block made."""
        (self.folder / "tenants.textproto").write_text(
            (DEPLOY / "example.textproto").read_text() +
            f'security {{ tokens_file: "{self.folder}/tokens" }}\ntenants {{ name: "team-a" }}\n')
        DaemonProcess((self.folder / "tenants.textproto").read_text()).stop()


class Table(unittest.TestCase):
    def test_the_capacities_are_what_the_daemon_computes(self):
        rows = re.findall(r"^\| (\w+) \| ([\d.]+) \| ([\d.]+) \|$", TEXT, re.MULTILINE)
        self.assertGreater(len(rows), 5)
        for model, *stated in rows:
            for precision, mebibytes in zip(("bf16", "fp8_kv"), stated):
                with tempfile.NamedTemporaryFile("w", suffix=".textproto") as file:
                    file.write(f'policy {{ allow_fp8_kv: true }} models {{ name: "m" hf_config: '
                               f'"{ROOT}/tests/data/hf/{model}.json" precision: {precision} '
                               "expected_seqs: 16 expected_tokens: 8192 }")
                    file.flush()
                    status, said = run(BIN / "fp8kvd", "--check_config", f"--config={file.name}")
                self.assertEqual(status, 0, said)
                (computed,) = re.findall(r"^# pools: \d+ bytes \(([\d.]+) MiB\)", said,
                                         re.MULTILINE)
                self.assertEqual(float(computed), float(mebibytes), f"{model} {precision}")


class Words(unittest.TestCase):
    def test_every_alert_has_a_section_that_its_runbook_link_finds(self):
        alerts = (DEPLOY / "prometheus/alerts.yaml").read_text()
        names = re.findall(r"- alert: (\w+)", alerts)
        self.assertEqual(re.findall(r"^### (Fp8kvd\w+)$", TEXT, re.MULTILINE), names)
        self.assertEqual(re.findall(r"runbook: docs/operations.md#(\w+)", alerts),
                         [name.lower() for name in names])

    def test_links_and_files_exist(self):
        for link in re.findall(r"\]\(([^)#]+)\)", TEXT):
            self.assertTrue((ROOT / "docs" / link).is_file(), link)
        anchors = {re.sub(r"[^a-z ]", "", head.lower()).replace(" ", "-")
                   for head in re.findall(r"^##+ (.*)$", TEXT, re.MULTILINE)}
        for anchor in re.findall(r"\]\(#([^)]+)\)", TEXT):
            self.assertIn(anchor, anchors)
        for path in re.findall(r"\b((?:deploy|tests)/[\w./-]*\w)", TEXT):
            self.assertTrue((ROOT / path).exists(), path)

    def test_options_exist(self):
        _, known = run(BIN / "fp8kvd", "--help")
        for name in re.findall(r"`(\w+_\w+)`", TEXT):
            if name.startswith("fp8kvd_"):
                self.assertIn(f'"{name}"', METRICS)
            elif name not in ("fp8_kv", "ttl_ms"):  # a precision; a field of CreateSequences
                self.assertIn(name, known)


if __name__ == "__main__":
    unittest.main()
