"""The status page in a real browser: it draws, asks nobody else, takes the keyboard, fits a
phone, can be read in light and dark. `statusz_test.py --screenshots FOLDER` makes the pictures of
docs/."""

import json
import pathlib
import shutil
import sys
import threading
import unittest

import tools
from browser import Browser
from harness import Daemon, TestCase, kv
from tools import get, wait_until

# Text colours on what they stand on, by the page's variables.
PAIRS = [("--ink", "--page"), ("--ink", "--card"), ("--dim", "--page"), ("--dim", "--card"),
         ("--a", "--card"), ("--b", "--card"), ("--good", "--page"), ("--warn", "--page"),
         ("--bad", "--page")]


def contrast(one, other):
    """WCAG's ratio of two #rrggbb colours."""
    def luminance(colour):
        parts = [int(colour[i:i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


class Load:
    """Decodes and prompts until it is told to stop; a `with` of its own daemon's harness."""

    def __init__(self, case):
        self.case, self.stopping = case, threading.Event()
        case.setUp()
        self.thread = threading.Thread(target=self.run)

    def run(self):
        seqs = self.case.create("plain_bf16", 8) + self.case.create("plain_fp8_kv", 4)
        rich = self.case.create("rich_fp8_kv", 2)
        for seq in seqs:
            self.case.append(seq, 300)
        while not self.stopping.is_set():
            self.case.stub.Decode(self.case.request(seqs[:8]))
            self.case.stub.Decode(self.case.request(seqs[8:]))
            for seq in rich:
                self.case.append(seq, 10)
            if len(seqs[0].k[0]) > 900:
                self.case.stub.TruncateSequences(kv.TruncateSequencesRequest(
                    handles=[s.handle for s in seqs], seq_lens=[300] * len(seqs)))
                for seq in seqs:
                    seq.truncate(300)

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.stopping.set()
        self.thread.join()
        self.case.free_all()


class Page(TestCase):
    @classmethod
    def setUpClass(cls):
        port = tools.free_port()
        cls.url = f"http://127.0.0.1:{port}"
        cls.daemon = Daemon(cls.config, http_address=f"127.0.0.1:{port}")
        cls.stub = cls.daemon.stub
        info = cls.stub.GetServerInfo(kv.GetServerInfoRequest())
        cls.models = {model.name: model for model in info.models}
        cls.browser = Browser()
        with Load(cls("test_it_draws_what_the_daemon_counts")):
            wait_until(lambda: len(json.loads(get(cls.url + "/statusz.json"))["history"]
                                   ["time_ms"]) >= 3, "three samples")

    @classmethod
    def tearDownClass(cls):
        cls.browser.close()
        super().tearDownClass()

    def show(self, **how):
        """Opens the page and waits until it has drawn."""
        browser = self.browser
        browser.requests.clear()
        browser.faults.clear()
        browser.open(self.url + "/statusz", **how)
        wait_until(lambda: browser.value("document.querySelectorAll('#charts path').length") or
                   browser.faults, "a drawn page")
        self.assertEqual(browser.faults, [])
        return browser

    def test_it_draws_what_the_daemon_counts(self):
        browser = self.show()
        self.assertEqual(browser.value("document.getElementById('state').textContent"), "ready")
        self.assertEqual(browser.value("document.title"), "fp8kvd: ready")
        names = browser.value(
            "[...document.querySelectorAll('#models h3')].map(n => n.textContent)")
        self.assertEqual(names, list(self.models))
        reasons = browser.value("document.getElementById('models').textContent")
        for model in self.models.values():
            self.assertIn(model.precision_reason, reasons)
        rows = browser.value("charts[3].data.history.rows_per_s")
        self.assertGreater(max(rows), 0)
        line = browser.value("document.querySelectorAll('#charts path')[3].getAttribute('d')")
        self.assertGreater(line.count("L") + line.count("M"), 1)

    def test_it_asks_its_own_daemon_alone(self):
        browser = self.show()
        asked = {url for url in browser.requests if not url.startswith("data:")}
        self.assertEqual(asked, {self.url + "/statusz", self.url + "/statusz.json"})

    def test_the_keyboard_reaches_everything(self):
        browser = self.show()
        reached = []
        for _ in range(16):
            browser.key("Tab")
            reached.append(browser.value(
                "document.activeElement.id || document.activeElement.tagName"))
        self.assertEqual(reached[:2], ["pause", "theme"])
        self.assertEqual(reached.count("FIGURE"), browser.value("charts.length"))
        browser.value("charts[0].node.focus()")
        browser.key("End")
        browser.key("ArrowLeft")
        said = browser.value("document.getElementById('said').textContent")
        self.assertRegex(said, r"^Pages used, \d+ s ago: of all pools [\d.]+ %$")
        self.assertTrue(browser.value("!!charts[0].svg.querySelector('.cursor')"))
        browser.key("Escape")
        self.assertFalse(browser.value("!!charts[0].svg.querySelector('.cursor')"))
        browser.key("p", "p")
        self.assertEqual(
            browser.value("document.getElementById('pause').getAttribute('aria-pressed')"), "true")

    def test_a_narrow_screen_scrolls_one_way_only(self):
        for width in (320, 390, 768):
            browser = self.show(width=width, height=800)
            self.assertLessEqual(browser.value("document.scrollingElement.scrollWidth"), width)

    def test_light_and_dark_can_be_read(self):
        pages = set()
        for scheme in ("light", "dark"):
            browser = self.show(scheme=scheme)
            colours = {name: browser.value("getComputedStyle(document.documentElement)"
                                           f".getPropertyValue('{name}').trim()")
                       for name in {name for pair in PAIRS for name in pair}}
            pages.add(colours["--page"])
            for text, ground in PAIRS:
                self.assertGreaterEqual(contrast(colours[text], colours[ground]), 4.5,
                                        f"{scheme}: {text} on {ground}")
        self.assertEqual(len(pages), 2)
        for theme in ("light", "dark", "auto"):  # a choice of one's own wins
            browser.key("t", "t")
            self.assertEqual(browser.value("document.getElementById('theme').textContent"),
                             f"Theme: {theme}")

    def test_a_daemon_that_is_gone_shows(self):
        daemon = Daemon(self.config, http_address=f"127.0.0.1:{tools.free_port()}")
        url = next(word for word in daemon.process.args
                   if str(word).startswith("--http_address=")).split("=")[1]
        self.browser.open(f"http://{url}/statusz")
        state = "document.getElementById('state')?.textContent"
        wait_until(lambda: self.browser.value(state) == "ready", "the page")
        daemon.stop()
        wait_until(lambda: self.browser.value(state) == "silent", "its silence")


def screenshots(folder):
    """The pictures of docs/, of a daemon under load for a minute and a half."""
    Page.setUpClass()
    case = Page("test_it_draws_what_the_daemon_counts")
    with Load(case):
        wait = wait_until
        tools.WAIT_S = 200
        wait(lambda: len(json.loads(get(Page.url + "/statusz.json"))["history"]["time_ms"]) >= 45,
             "the samples of 90 s")
        for name, how in (("statusz_light", {"scheme": "light", "height": 1000}),
                          ("statusz_dark", {"scheme": "dark", "height": 1000}),
                          ("statusz_narrow", {"width": 390, "height": 844, "scheme": "dark"})):
            case.show(**how).screenshot(pathlib.Path(folder) / f"{name}.png")
    Page.tearDownClass()


if __name__ == "__main__":
    if shutil.which("chromium-headless-shell") is None:
        print("skipped: needs Debian's chromium-headless-shell, which Ubuntu does not have")
        sys.exit(77)
    if sys.argv[1:2] == ["--screenshots"]:
        screenshots(sys.argv[2])
    else:
        unittest.main()
