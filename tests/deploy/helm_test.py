"""The Helm chart: rendered by Helm's own engine (its Go library, from PyPI), held against the
schemas of Kubernetes, and its configuration and flags given to the daemon."""

import json
import pathlib
import re
import tempfile
import unittest

import helm_python as helm
import kubernetes_validate
import yaml

from tools import DEPLOY, ROOT, run
from daemon_process import BIN

CHART = DEPLOY / "helm/fp8kvd"
VERSIONS = ("1.25", "1.30", "1.35")  # the oldest that Chart.yaml takes, and newer ones
EVERYTHING = {
    "replicas": 3,
    "image": {"repository": "registry.example/fp8kvd", "tag": "1", "pullPolicy": "Always"},
    "imagePullSecrets": [{"name": "registry"}],
    "gpu": {"enabled": True, "count": 8, "runtimeClassName": "nvidia"},
    "networkPolicy": {"clients": [{"podSelector": {"matchLabels": {"app": "engine"}}}],
                      "monitoring": [{"namespaceSelector": {"matchLabels": {"name": "mon"}}}]},
    "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
    "serviceAccount": {"name": "attention", "annotations": {"a": "b"}},
    "podAnnotations": {"c": "d"}, "podLabels": {"e": "f"}, "nodeSelector": {"gpu": "h200"},
    "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
    "affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [
        {"topologyKey": "kubernetes.io/hostname",
         "labelSelector": {"matchLabels": {"app.kubernetes.io/name": "fp8kvd"}}}]}},
    "snapshot": {"enabled": True, "size": "80Gi", "storageClassName": "fast", "seconds": 30},
    "priorityClassName": "high", "extraArgs": ["--poller_threads=4"],
    "extraVolumes": [{"name": "more", "emptyDir": {}}],
    "extraVolumeMounts": [{"name": "more", "mountPath": "/more"}],
    "sharedMemory": {"enabled": True, "group": 2000},
    "extraContainers": [{"name": "engine", "image": "registry.example/engine:1", "volumeMounts": [
        {"name": "shm-socket", "mountPath": "/run/fp8kvd"}]}],
}
TENANTS = {"config": {
    "security": {"tls_cert_file": "/etc/tls/tls.crt", "tls_key_file": "/etc/tls/tls.key",
                 "tokens_file": "/etc/tokens/tokens"},
    "tenants": [{"name": "a"}, {"name": "b", "items_per_s_max": 1000}],
    "shared_memory": {"shm_threads": 4}}}
NOTHING = {"gpu": {"enabled": False}, "networkPolicy": {"enabled": False},
           "podDisruptionBudget": {"enabled": False}, "replicas": 0}


def render(values=None):
    """The manifests by kind."""
    with helm.Chart.load(CHART) as chart:
        chart.validate_schema(values or {})
        rendered = chart.render(values or {}, name="demo", namespace="prod")
    objects = [yaml.safe_load(text) for path, text in rendered.items() if path.endswith(".yaml")]
    return {found["kind"]: found for found in objects if found}


def pod(objects):
    return objects["StatefulSet"]["spec"]["template"]["spec"]


def container(objects):
    return pod(objects)["containers"][0]


class Chart(unittest.TestCase):
    def test_lint_finds_nothing(self):
        for values in ({}, EVERYTHING, NOTHING):
            report = helm.lint(CHART, values, strict=True)
            found = [message for message in report["messages"] if message["severity"] > 1]
            self.assertEqual((found, report["errors"]), ([], []))

    def test_every_object_is_one_of_kubernetes(self):
        for values in ({}, EVERYTHING, NOTHING):
            for version in VERSIONS:
                for kind, found in render(values).items():
                    if kind != "ServiceMonitor":  # of the Prometheus operator
                        kubernetes_validate.validate(found, version, strict=True)

    def test_a_wrong_object_would_be_seen(self):
        found = render()["StatefulSet"]
        found["spec"]["template"]["spec"]["containers"][0]["readinesProbe"] = {}
        with self.assertRaises(kubernetes_validate.ValidationError):
            kubernetes_validate.validate(found, VERSIONS[0], strict=True)

    def test_kinds(self):
        always = {"ConfigMap", "Service", "ServiceAccount", "StatefulSet"}
        self.assertEqual(set(render(NOTHING)), always)
        self.assertEqual(set(render()), always | {"NetworkPolicy", "PodDisruptionBudget"})
        self.assertEqual(set(render(EVERYTHING)),
                         always | {"NetworkPolicy", "PodDisruptionBudget", "ServiceMonitor"})

    def test_selectors_find_the_pods(self):
        objects = render(EVERYTHING)
        labels = objects["StatefulSet"]["spec"]["template"]["metadata"]["labels"]
        for selector in (objects["StatefulSet"]["spec"]["selector"]["matchLabels"],
                         objects["Service"]["spec"]["selector"],
                         objects["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"],
                         objects["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"]):
            self.assertTrue(selector)
            self.assertLessEqual(selector.items(), labels.items())
        self.assertLessEqual(
            objects["ServiceMonitor"]["spec"]["selector"]["matchLabels"].items(),
            objects["Service"]["metadata"]["labels"].items())
        self.assertEqual(objects["Service"]["spec"]["clusterIP"], "None")
        self.assertEqual(objects["StatefulSet"]["spec"]["serviceName"],
                         objects["Service"]["metadata"]["name"])


class Pod(unittest.TestCase):
    def test_it_may_do_nothing_but_serve(self):
        objects = render()
        self.assertTrue(pod(objects)["securityContext"]["runAsNonRoot"])
        self.assertEqual(container(objects)["securityContext"],
                         {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True,
                          "capabilities": {"drop": ["ALL"]}})
        self.assertFalse(pod(objects)["automountServiceAccountToken"])
        self.assertEqual(render()["NetworkPolicy"]["spec"]["egress"], [])

    def test_probes_ask_over_http(self):
        found = container(render())
        for probe, path in (("startupProbe", "/readyz"), ("readinessProbe", "/readyz"),
                            ("livenessProbe", "/livez")):
            self.assertEqual(found[probe]["httpGet"], {"path": path, "port": "http"})

    def test_the_drain_ends_before_sigkill(self):
        for grace, pre_stop in ((60, 5), (30, 10), (3600, 0)):
            objects = render({"terminationGracePeriodSeconds": grace, "preStopSeconds": pre_stop})
            (drain,) = [word for word in container(objects)["args"] if "drain_ms_max" in word]
            self.assertEqual(int(drain.split("=")[1]), (grace - pre_stop - 5) * 1000)
            self.assertEqual(container(objects)["lifecycle"]["preStop"]["exec"]["command"],
                             ["sleep", str(pre_stop)])
        with self.assertRaisesRegex(helm.HelmRenderError, "must exceed preStopSeconds"):
            render({"terminationGracePeriodSeconds": 15, "preStopSeconds": 10})

    def test_a_snapshot_has_a_volume_and_time_of_its_own(self):
        self.assertNotIn("volumeClaimTemplates", render()["StatefulSet"]["spec"])
        self.assertNotIn("snapshot", " ".join(container(render())["args"]))
        objects = render({"snapshot": {"enabled": True, "seconds": 30}})
        args = container(objects)["args"]
        self.assertIn("--snapshot_ms_max=30000", args)
        self.assertIn("--drain_ms_max=20000", args)  # 60 s - 5 - 5 - 30
        (claim,) = objects["StatefulSet"]["spec"]["volumeClaimTemplates"]
        self.assertEqual(claim["spec"]["resources"]["requests"]["storage"], "100Gi")
        (mount,) = [found for found in container(objects)["volumeMounts"]
                    if found["name"] == claim["metadata"]["name"]]
        self.assertIn(f"--snapshot_dir={mount['mountPath']}", args)
        self.assertEqual(pod(objects)["securityContext"]["fsGroup"],
                         pod(objects)["securityContext"]["runAsGroup"])
        with self.assertRaisesRegex(helm.HelmRenderError, "and snapshot.seconds"):
            render({"snapshot": {"enabled": True, "seconds": 50}})

    def test_a_gpu_is_asked_for_only_where_one_serves(self):
        objects = render()
        self.assertEqual(container(objects)["resources"]["limits"]["nvidia.com/gpu"], 1)
        self.assertIn("--device=cuda", container(objects)["args"])
        self.assertIn("--devices=0", container(objects)["args"])
        objects = render(NOTHING)
        self.assertNotIn("nvidia.com/gpu", container(objects)["resources"]["limits"])
        self.assertIn("--device=cpu", container(objects)["args"])
        self.assertNotIn("--devices", " ".join(container(objects)["args"]))

    def test_a_pod_serves_as_many_gpus_as_it_asks_for(self):
        objects = render({"gpu": {"count": 4, "resource": "example.com/gpu"}})
        self.assertEqual(container(objects)["resources"]["limits"]["example.com/gpu"], 4)
        self.assertIn("--devices=0,1,2,3", container(objects)["args"])
        for count in (0, 17, "2"):
            with self.assertRaisesRegex(helm.HelmError, "count"):
                render({"gpu": {"count": count}})

    def test_a_changed_configuration_is_a_new_pod(self):
        def annotations(values):
            return render(values)["StatefulSet"]["spec"]["template"]["metadata"]["annotations"]
        self.assertNotEqual(annotations({})["checksum/config"], annotations(
            {"config": {"policy": {"allow_fp8_kv": True}}})["checksum/config"])

    def test_an_engine_in_the_pod_may_share_memory(self):
        objects = render(EVERYTHING)
        (volume,) = [v for v in pod(objects)["volumes"] if v["name"] == "shm-socket"]
        self.assertEqual(volume["emptyDir"]["medium"], "Memory")
        self.assertEqual(pod(objects)["securityContext"]["fsGroup"], 2000)
        self.assertIn("--shm_group_access=true", container(objects)["args"])
        (socket,) = [word for word in container(objects)["args"] if "shm_socket=" in word]
        for found in pod(objects)["containers"]:
            (mount,) = [m for m in found["volumeMounts"] if m["name"] == "shm-socket"]
            self.assertTrue(socket.startswith(f"--shm_socket={mount['mountPath']}/"), socket)
        objects = render()
        self.assertIn("--shm_enabled=false", container(objects)["args"])
        self.assertNotIn("fsGroup", pod(objects)["securityContext"])
        self.assertEqual(len(pod(objects)["containers"]), 1)

    def test_the_daemon_takes_the_configuration_and_the_flags(self):
        for values in ({}, EVERYTHING, TENANTS):
            objects = render(values)
            with tempfile.TemporaryDirectory() as folder:
                path = pathlib.Path(folder, "fp8kvd.json")
                path.write_text(objects["ConfigMap"]["data"]["fp8kvd.json"])
                args = [f"--config={path}" if word.startswith("--config=") else word
                        for word in container(objects)["args"]]
                status, said = run(BIN / "fp8kvd", "--check_config", *args)
            self.assertEqual(status, 0, said)
            self.assertIn("0.0.0.0:50051", said)


class Values(unittest.TestCase):
    SCHEMA = json.loads((CHART / "values.schema.json").read_text())
    VALUES = yaml.safe_load((CHART / "values.yaml").read_text())

    def test_each_one_has_a_schema_and_each_schema_a_value(self):
        self.assertEqual(set(self.SCHEMA["properties"]) - {"global"}, set(self.VALUES))
        for name, value in self.VALUES.items():
            schema = self.SCHEMA["properties"][name]
            if schema.get("additionalProperties") is False and name != "config":
                self.assertEqual(set(schema["properties"]), set(value), name)

    def test_the_configuration_may_say_all_that_the_daemon_takes(self):
        proto = (ROOT / "config/config.proto").read_text()
        message = proto.partition("message Config {\n")[2].partition("}")[0]
        sections = set(re.findall(r"(\w+) = \d+;", message))
        self.assertIn("security", sections)
        self.assertEqual(set(self.SCHEMA["properties"]["config"]["properties"]),
                         sections - {"drain"})  # terminationGracePeriodSeconds says that

    def test_wrong_ones_are_refused_by_name(self):
        for wrong, word in (({"replica": 2}, "replica"), ({"replicas": "2"}, "replicas"),
                            ({"config": {"models": []}}, "models"),
                            ({"config": {"server": {"listen_address": ":1"}}}, "server"),
                            ({"config": {"engine": {"device": "cpu"}}}, "engine"),
                            ({"config": {"engine": {"devices": "0"}}}, "engine"),
                            ({"config": {"tenants": [{"seqs_max": 1}]}}, "tenants"),
                            ({"config": {"shared_memory": {"shm_socket": "/a"}}}, "shared_memory"),
                            ({"extraArgs": ["poller_threads=4"]}, "extraArgs"),
                            ({"terminationGracePeriodSeconds": 5}, "terminationGrace")):
            with self.assertRaises(helm.HelmError) as raised:
                render(wrong)
            self.assertIn(word, str(raised.exception))


if __name__ == "__main__":
    unittest.main()
