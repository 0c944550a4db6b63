"""Metrics as Prometheus sees them: names and units, a real scrape, alerts, the dashboard."""

import json
import pathlib
import re
import shutil
import tempfile
import unittest
import urllib.error
import urllib.parse

import grpc

import tools
from tools import DEPLOY, ROOT, get, need, run, wait_until
from harness import Daemon, TestCase, kv

# gRFC A66's bounds of latency histograms, in seconds.
A66 = [float(bound) for bound in (
    "0 1e-05 5e-05 0.0001 0.0003 0.0006 0.0008 0.001 0.002 0.003 0.004 0.005 0.006 0.008 0.01 "
    "0.013 0.016 0.02 0.025 0.03 0.04 0.05 0.065 0.08 0.1 0.13 0.16 0.2 0.25 0.3 0.4 0.5 0.65 "
    "0.8 1 2 5 10 20 50 100 +Inf").split()]
# Only where a GPU serves; tests/ops/nvml_test.cc sees them with a stand-in for its library.
GPU_ONLY = {"fp8kvd_gpu_memory_bytes", "fp8kvd_gpu_utilization_ratio"}


def families(text):
    """Names of the families of a scrape."""
    return set(re.findall(r"^# TYPE (\w+) ", text, re.MULTILINE))


def series(text):
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def names_in_source():
    """Every metric that server/ops can show."""
    text = "".join(path.read_text() for path in (ROOT / "server/ops").glob("*.cc"))
    return set(re.findall(r'"(fp8kvd_[a-z0-9_]+)"', text))


def names_in(expression):
    """The metrics of a PromQL expression, by the names of their families."""
    return set(re.sub(r"_(bucket|sum|count)$", "", name)
               for name in re.findall(r"\bfp8kvd_[a-z0-9_]+", expression))


def dashboard_queries():
    """(panel's title, query) of deploy/grafana/fp8kvd.json."""
    dashboard = json.loads((DEPLOY / "grafana/fp8kvd.json").read_text())
    for panel in dashboard["panels"]:
        for target in panel.get("targets", []):
            yield panel["title"], target["expr"]


class WithHttp(TestCase):
    """The harness's daemon, with an HTTP port."""

    @classmethod
    def setUpClass(cls):
        cls.http_port = tools.free_port()
        snapshots = tempfile.TemporaryDirectory(prefix="fp8kvd_snapshots_")
        cls.addClassCleanup(snapshots.cleanup)
        cls.daemon = Daemon(cls.config, [f"--snapshot_dir={snapshots.name}"],
                            http_address=f"127.0.0.1:{cls.http_port}")
        cls.stub = cls.daemon.stub
        info = cls.stub.GetServerInfo(kv.GetServerInfoRequest())
        cls.models = {model.name: model for model in info.models}

    def scrape(self):
        return get(f"http://127.0.0.1:{self.http_port}/metrics")

    def traffic(self):
        """A little of everything that moves a counter."""
        seqs = self.create("plain_bf16", 2) + self.create("plain_fp8_kv", 1)
        for seq in seqs:
            self.append(seq, 70)
            self.stub.Decode(self.request([seq]))
        rich = self.create("rich_bf16")[0]
        self.append(rich, 300, chunk=50)  # its window drops pages
        list(self.stub.DecodeStream(iter([self.request(seqs[:2])])))
        self.stub.ForkSequences(kv.ForkSequencesRequest(parent=seqs[0].handle, count=1))
        self.free_all()
        self.fails(grpc.StatusCode.NOT_FOUND, lambda: self.stub.CreateSequences(
            kv.CreateSequencesRequest(model="none")))


class Scrape(WithHttp):
    def test_names_and_units_pass_promtool(self):
        self.traffic()
        status, said = run(need("promtool"), "check", "metrics", input=self.scrape())
        self.assertEqual((status, said.strip()), (0, ""))

    def test_every_metric_of_the_source_is_shown_and_no_other(self):
        self.traffic()
        missing = names_in_source() ^ families(self.scrape())
        self.assertEqual({name for name in missing if not name.startswith("fp8kvd_shm_")},
                         GPU_ONLY)  # the same-host transport shows its own where it is on

    def test_latency_by_method_and_code_has_the_buckets_of_grpc(self):
        self.traffic()
        bounds = re.findall(
            r'^fp8kvd_call_seconds_bucket\{method="Decode",code="OK",le="([^"]+)"\}',
            self.scrape(), re.MULTILINE)
        self.assertEqual(list(map(float, bounds)), A66)

    def test_a_windowed_group_shows_its_evictions(self):
        self.traffic()
        found = re.search(r'^fp8kvd_page_evictions_total\{model="rich_bf16",group="0"\} (\d+)',
                          self.scrape(), re.MULTILINE)
        self.assertGreater(int(found[1]), 0)

    def test_used_and_free_pages_sum_to_the_pool_in_every_scrape(self):
        text = self.scrape()
        for model in self.models.values():
            for group, info in enumerate(model.groups):
                pages = re.findall(rf'^fp8kvd_pages\{{model="{model.name}",group="{group}",'
                                   r'state="(?:used|free)"\} (\d+)', text, re.MULTILINE)
                self.assertEqual(sum(map(int, pages)), info.pages_total)

    def test_what_clients_send_adds_no_series(self):
        """Cardinality: methods, codes and models are ours, never a client's words."""
        self.traffic()

        def storm(begin, count):
            for i in range(begin, begin + count):
                name = f"model_{i}"
                for call in (lambda: self.stub.CreateSequences(
                                 kv.CreateSequencesRequest(model=name)),
                             lambda: self.daemon.channel.unary_unary(f"/no.Such/{name}")(b"")):
                    with self.assertRaises(Exception):
                        call()

        storm(0, 1)
        before = len(series(self.scrape()))
        storm(1, 50)
        self.assertEqual(len(series(self.scrape())), before)


class Prometheus(WithHttp):
    """A real one scrapes the daemon; deploy's own configuration but for port and pace."""

    def setUp(self):
        super().setUp()
        folder = tempfile.TemporaryDirectory(prefix="fp8kvd_prometheus_")
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        config = (DEPLOY / "prometheus/prometheus.yaml").read_text()
        config = config.replace("127.0.0.1:50052", f"127.0.0.1:{self.http_port}")
        config = config.replace("15s", "500ms")
        (self.folder / "prometheus.yaml").write_text(config)
        shutil.copy(DEPLOY / "prometheus/alerts.yaml", self.folder)

    def start(self):
        self.port = tools.free_port()
        server = tools.running(
            [need("prometheus"), f"--config.file={self.folder}/prometheus.yaml",
             f"--storage.tsdb.path={self.folder}/data",
             f"--web.listen-address=127.0.0.1:{self.port}"], self.folder / "log")
        server.__enter__()
        self.addCleanup(server.__exit__, None, None, None)
        wait_until(self.is_ready, "Prometheus")

    def is_ready(self):
        try:
            return get(f"http://127.0.0.1:{self.port}/-/ready")
        except OSError:
            return False

    def query(self, expression):
        encoded = urllib.parse.urlencode({"query": expression})
        try:
            answer = json.loads(get(f"http://127.0.0.1:{self.port}/api/v1/query?{encoded}"))
        except urllib.error.HTTPError as error:
            self.fail(f"Prometheus refuses {expression}: {error.read().decode()}")
        self.assertEqual(answer["status"], "success", expression)
        return answer["data"]["result"]

    def test_it_scrapes_and_every_query_of_the_dashboard_has_data(self):
        self.traffic()
        self.start()
        wait_until(lambda: self.query('up{job="fp8kvd"} == 1'), "the first scrape")
        self.traffic()
        wait_until(lambda: self.query("sum(rate(fp8kvd_rows_total[1m])) > 0"), "the second scrape")
        for title, expression in dashboard_queries():
            expression = (expression.replace("$__rate_interval", "1m")
                          .replace("$instance", ".*").replace("$model", ".*"))
            result = self.query(expression)
            if not names_in(expression) & GPU_ONLY:
                self.assertTrue(result, f"no data for {title}: {expression}")

    def test_its_configuration_is_valid_with_the_rules(self):
        status, said = run(need("promtool"), "check", "config", self.folder / "prometheus.yaml")
        self.assertEqual(status, 0, said)
        self.assertIn("12 rules found", said)


class Rules(unittest.TestCase):
    ALERTS = (DEPLOY / "prometheus/alerts.yaml").read_text()
    TESTS = (ROOT / "tests/deploy/alerts_test.yaml").read_text()

    def names(self):
        return re.findall(r"- alert: (\w+)", self.ALERTS)

    def test_each_fires_for_its_cause_alone(self):
        with tempfile.TemporaryDirectory() as folder:
            for name, text in (("alerts.yaml", self.ALERTS), ("alerts_test.yaml", self.TESTS)):
                pathlib.Path(folder, name).write_text(text)
            status, said = run(need("promtool"), "test", "rules", "alerts_test.yaml", cwd=folder)
        self.assertEqual(status, 0, said)

    def test_none_is_untested(self):
        fired = set(re.findall(r"- alertname: (\w+)", self.TESTS))
        self.assertEqual(fired, set(self.names()))

    def test_they_name_metrics_that_exist(self):
        self.assertLessEqual(names_in(self.ALERTS), names_in_source())


class Dashboard(unittest.TestCase):
    def test_every_query_names_a_metric_that_exists(self):
        queries = list(dashboard_queries())
        self.assertGreater(len(queries), 40)
        for title, expression in queries:
            self.assertLessEqual(names_in(expression), names_in_source(), title)


if __name__ == "__main__":
    unittest.main()
