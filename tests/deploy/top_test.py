"""fp8kvctl top: the status page's numbers in a terminal."""

import json
import re
import unittest

import tools
from daemon_process import BIN
from harness import Daemon, TestCase, kv
from tools import ROOT, get, run, wait_until


class Top(TestCase):
    @classmethod
    def setUpClass(cls):
        cls.http = f"127.0.0.1:{tools.free_port()}"
        cls.daemon = Daemon(cls.config, http_address=cls.http)
        cls.stub = cls.daemon.stub
        info = cls.stub.GetServerInfo(kv.GetServerInfoRequest())
        cls.models = {model.name: model for model in info.models}

    def status(self):
        return json.loads(get(f"http://{self.http}/statusz.json"))

    def test_it_shows_what_the_page_shows(self):
        (seq,) = self.create("plain_fp8_kv")
        self.append(seq, 200)
        wait_until(lambda: any(self.status()["history"]["append_tokens_per_s"]), "a sample")
        status, said = run(BIN / "fp8kvctl", "top", f"--http={self.http}", "--times=1")
        self.assertEqual(status, 0, said)
        self.assertRegex(said, r"^fp8kvd \S+, ready, on cpu \(")
        self.assertRegex(said, r"\nsequences +1 +1 +▁*█")
        self.assertRegex(said, r"\nappended \(token, layer\) pairs +\S+/s +\S+/s +▁*█")
        self.assertRegex(said, r"\nplain_fp8_kv +0,1 +fp8_kv +all +4 ")
        for name, model in self.models.items():
            self.assertIn(f"{name}: {model.precision_reason}", said)

    def test_it_leaves_no_series_out(self):
        source = (ROOT / "client/cc/ctl/top.cc").read_text()
        rows = source.split("kRows[] = {")[1].split("};")[0]
        shown = re.findall(r'\{"(\w+)",', rows)
        self.assertEqual(set(shown) | {"time_ms"}, set(self.status()["history"]))

    def test_json_is_the_pages_own(self):
        status, said = run(BIN / "fp8kvctl", "top", f"--http={self.http}", "--json")
        self.assertEqual(status, 0)
        self.assertEqual(set(json.loads(said)), set(self.status()))

    def test_it_clears_the_screen_only_where_it_looks_again(self):
        _, once = run(BIN / "fp8kvctl", "top", f"--http={self.http}", "--times=1")
        _, twice = run(BIN / "fp8kvctl", "top", f"--http={self.http}", "--times=2")
        self.assertEqual((once.count("\x1b[2J"), twice.count("\x1b[2J")), (0, 2))

    def test_where_no_daemon_is_it_says_so(self):
        status, said = run(BIN / "fp8kvctl", "top", f"--http=127.0.0.1:{tools.free_port()}")
        self.assertEqual(status, 3)
        self.assertIn("cannot be reached; is fp8kvd there, and --http its http_address?", said)
        status, said = run(BIN / "fp8kvctl", "top", f"--http={self.daemon.address}")
        self.assertEqual(status, 3)
        self.assertIn("speaks no HTTP/1.1", said)  # it is gRPC's port


if __name__ == "__main__":
    unittest.main()
