"""deploy/Dockerfile, built and run without a docker engine: buildah on a base that debootstrap
makes of this machine's own release, podman; and deploy/compose.yaml by podman-compose. Needs root;
skipped without.

The image takes the package of this build (PACKAGE=ready), so that it costs no second compilation.
FP8KVD_IMAGE_FROM=source, for this file run by hand, compiles it in its own stage, kernels included,
as a user's `docker build` does: eight minutes of processor time that a test run does not have. To
be done when deploy/Dockerfile, deploy/packages.txt or the build changes."""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

import yaml

import tools
from daemon_process import BIN
from tools import DEPLOY, ROOT, get, need, run, wait_until

BUILD = pathlib.Path(os.environ.get("FP8KVD_BUILD_DIR", ROOT / "build/release"))
IMAGE = "localhost/fp8kvd"
SECONDS_MAX = 250  # of a command
BYTES_ABOVE_BASE_MAX = 200_000_000
IS_FROM_SOURCE = os.environ.get("FP8KVD_IMAGE_FROM") == "source"
AUTHORITIES = pathlib.Path("/etc/ssl/certs/ca-certificates.crt")


def os_release():
    lines = pathlib.Path("/etc/os-release").read_text().splitlines()
    return {name: value.strip('"') for name, _, value in (line.partition("=") for line in lines)}


def mirror():
    """Where this machine's apt gets its release from."""
    sites = subprocess.run(
        ["apt-get", "indextargets", "--format", "$(SITE)", "Created-By: Packages",
         f"Suite: {os_release()['VERSION_CODENAME']}"], capture_output=True, text=True, check=True)
    found = [site for site in sites.stdout.split() if "debian" in site or "ubuntu" in site]
    return found[0] if found else "http://deb.debian.org/debian"


class Image(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = pathlib.Path(tempfile.mkdtemp(prefix="fp8kvd_image_"))
        # podman takes 50 characters for it, and a test's own folder may be longer.
        cls.run_folder = pathlib.Path(tempfile.mkdtemp(prefix="fp8kvd_image_", dir="/run"))
        # Never into what a container has mounted.
        for folder in (cls.folder, cls.run_folder):
            cls.addClassCleanup(cls.must, need("rm"), "-rf", "--one-file-system", folder)
        cls.addClassCleanup(cls.podman, "rm", "-fa")
        cls.make_base()
        if IS_FROM_SOURCE:
            cls.build(ROOT, "BUILD_BASE=localhost/base",
                      "--secret", f"id=ca,src={AUTHORITIES}", seconds_max=7200)
            return
        cls.must(need("cpack"), "-G", "DEB", "-B", cls.folder / "context/build/deb", "--config",
                 BUILD / "CPackConfig.cmake")
        shutil.copytree(DEPLOY, cls.folder / "context/deploy")
        cls.build(cls.folder / "context", "PACKAGE=ready")

    @classmethod
    def build(cls, context, build_arg, *more, seconds_max=SECONDS_MAX):
        cls.must(*cls.store("buildah"), "build", "--isolation", "chroot", "--network", "host",
                 "--build-arg", "BASE=localhost/base", "--build-arg", build_arg, *more,
                 "-f", context / "deploy/Dockerfile", "-t", IMAGE, context,
                 seconds_max=seconds_max)

    @classmethod
    def store(cls, tool):
        """The tool's command, with images and containers in our folders."""
        return [need(tool), "--root", cls.folder / "store", "--runroot", cls.run_folder,
                "--storage-driver", "vfs"]

    @classmethod
    def must(cls, *command, seconds_max=SECONDS_MAX):
        done = subprocess.run([str(word) for word in command], stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, text=True, timeout=seconds_max,
                              check=False)
        if done.returncode != 0:
            raise RuntimeError(f"{command[0]} failed:\n{done.stdout[-4000:]}")
        return done.stdout

    @classmethod
    def podman_command(cls):
        return [*cls.store("podman"), "--cgroup-manager", "cgroupfs", "--events-backend", "none",
                "--runtime", "runc"]

    @classmethod
    def podman(cls, *words, **options):
        return run(*cls.podman_command(), *words, **options)

    @classmethod
    def make_base(cls):
        release = os_release()
        components = "main,universe" if release["ID"] == "ubuntu" else "main"
        base = cls.folder / "base"
        cls.must(need("debootstrap"), "--variant=minbase", f"--components={components}",
                 release["VERSION_CODENAME"], base, mirror())
        shutil.rmtree(base / "var/cache/apt/archives")
        (base / "var/cache/apt/archives/partial").mkdir(parents=True)
        container = cls.must(*cls.store("buildah"), "from", "scratch").split()[-1]
        cls.must(*cls.store("buildah"), "add", "-q", container, base, "/")
        cls.must(*cls.store("buildah"), "commit", "-q", "--rm", container, "localhost/base")

    def inspect(self, image):
        status, said = self.podman("image", "inspect", image)
        self.assertEqual(status, 0, said)
        return json.loads(said[said.index("[\n"):])[0]

    def test_it_is_small_and_nobody_special(self):
        image = self.inspect(IMAGE)
        self.assertLess(image["Size"] - self.inspect("localhost/base")["Size"],
                        BYTES_ABOVE_BASE_MAX)
        self.assertEqual(image["Config"]["User"], "65532:65532")
        self.assertIn("NVIDIA_DRIVER_CAPABILITIES=compute,utility", image["Config"]["Env"])
        self.assertIn("NVIDIA_VISIBLE_DEVICES=all", image["Config"]["Env"])

    def run_it(self, *words):
        return ["--name", self.id().rsplit(".", 1)[-1], "--network", "host", "--read-only",
                "--cap-drop", "all", "--ulimit", "nofile=4096:4096", "--ulimit", "nproc=4096:4096",
                "--log-driver", "k8s-file", *words]

    def test_it_has_no_compiler(self):
        status, said = self.podman("run", *self.run_it("--entrypoint", "/bin/sh"), IMAGE, "-c",
                                   "id -u; command -v cc gcc g++ c++ nvcc cmake ninja || echo none")
        self.assertEqual(status, 0, said)
        self.assertEqual(said.split()[-2:], ["65532", "none"], said)

    def test_it_serves_and_podman_stop_drains_it(self):
        port, http = tools.free_port(), tools.free_port()
        status, said = self.podman(
            "run", "-d", *self.run_it(), IMAGE, "--config=/etc/fp8kvd/fp8kvd.textproto",
            f"--listen_address=127.0.0.1:{port}", f"--http_address=127.0.0.1:{http}")
        self.assertEqual(status, 0, said)
        name = self.id().rsplit(".", 1)[-1]

        def ready():
            try:
                return get(f"http://127.0.0.1:{http}/readyz")
            except OSError:
                return None

        wait_until(ready, "the daemon in the container")
        status, said = run(BIN / "fp8kvctl", "replay", f"--target=127.0.0.1:{port}",
                           *(ROOT / "tests/data/captures").glob("*.safetensors"))
        self.assertEqual(status, 0, said)
        status, said = self.podman("stop", "-t", "30", name)
        self.assertEqual(status, 0, said)
        status, said = self.podman("inspect", name, "--format", "exit {{.State.ExitCode}}")
        self.assertIn("exit 0", said)
        _, said = self.podman("logs", name)
        self.assertRegex(said, r"drained: \d+ requests taken, \d+ answered")


    def compose_folder(self, ports):
        """deploy/ with other ports, and limits that every machine allows."""
        copy = self.folder / "compose/deploy"
        shutil.copytree(DEPLOY, copy)
        compose = yaml.safe_load((copy / "compose.yaml").read_text())
        for service in compose["services"].values():
            service["ulimits"] = {"nofile": 4096, "nproc": 4096}
        (copy / "compose.yaml").write_text(yaml.safe_dump(compose))
        for name in ("compose.yaml", "example.textproto", "prometheus/prometheus.yaml"):
            text = (copy / name).read_text()
            for port, other in ports.items():
                text = text.replace(f"127.0.0.1:{port}", f"127.0.0.1:{other}")
            (copy / name).write_text(text.replace("scrape_interval: 15s", "scrape_interval: 1s"))
        return copy

    def make_prometheus(self):
        """Debian's, where compose.yaml names the one of a registry that tests do not reach. With
        its libraries and nothing else, since vfs copies an image for each container."""
        folder = self.folder / "prometheus"
        (folder / "root/bin").mkdir(parents=True)
        program = need("prometheus")
        shutil.copy(program, folder / "root/bin")
        for library in re.findall(r"(/\S+) \(0x", self.must("ldd", program)):
            (folder / "root" / library[1:]).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(library, folder / "root" / library[1:])
        (folder / "Dockerfile").write_text(
            "FROM scratch\nCOPY root /\nWORKDIR /prometheus\n"
            "ENTRYPOINT [\"/bin/prometheus\", \"--storage.tsdb.path=/prometheus\"]\n")
        self.must(*self.store("buildah"), "build", "--isolation", "chroot", "-t",
                  "localhost/" + Compose.SERVICES["prometheus"]["image"], folder)

    def test_compose_starts_it_and_prometheus_scrapes_it(self):
        http, prometheus = tools.free_port(), tools.free_port()
        copy = self.compose_folder({50051: tools.free_port(), 50052: http, 9090: prometheus})
        self.make_prometheus()
        podman = self.folder / "podman"  # with our store
        podman.write_text(f"#!/bin/sh\nexec {' '.join(map(str, self.podman_command()))} \"$@\"\n")
        podman.chmod(0o755)
        compose = [sys.executable, "-m", "podman_compose", "--podman-path", podman, "--in-pod", "0",
                   "-p", "fp8kvd_test", "-f", copy / "compose.yaml"]
        status, said = run(*compose, "up", "-d", "--no-build", "fp8kvd", "prometheus")
        self.addCleanup(run, *compose, "down", "-v")
        self.assertEqual(status, 0, said)

        def scraped():
            try:
                found = json.loads(get(f"http://127.0.0.1:{prometheus}/api/v1/query?query=up"))
            except OSError:
                return None
            return [one["value"][1] for one in found["data"]["result"]] == ["1"]

        wait_until(scraped, "Prometheus's scrape of the daemon, both under podman-compose")
        self.assertIn("fp8kvd_build_info", get(f"http://127.0.0.1:{http}/metrics"))
        rules = json.loads(get(f"http://127.0.0.1:{prometheus}/api/v1/rules"))
        self.assertTrue(rules["data"]["groups"])
        status, said = run(*compose, "stop")
        self.assertEqual(status, 0, said)
        _, said = self.podman("ps", "-a", "--format", "{{.Names}} {{.ExitCode}}")
        self.assertIn("fp8kvd_test_fp8kvd_1 0", said)


class Compose(unittest.TestCase):
    SERVICES = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]

    def test_what_it_mounts_is_there(self):
        for service in self.SERVICES.values():
            for volume in service["volumes"]:
                source = volume.split(":")[0]
                if source.startswith("."):
                    self.assertTrue((DEPLOY / source).exists(), source)
        build = self.SERVICES["fp8kvd"]["build"]
        self.assertTrue((DEPLOY / build["context"] / build["dockerfile"]).is_file())

    def test_its_parts_find_each_other(self):
        source = yaml.safe_load(
            (DEPLOY / "grafana/provisioning/datasources/prometheus.yaml").read_text())
        listen = next(word for word in self.SERVICES["prometheus"]["command"] if "listen" in word)
        self.assertEqual(source["datasources"][0]["url"], "http://" + listen.split("=")[1])
        home = self.SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
        self.assertIn(f"./grafana/fp8kvd.json:{home}:ro", self.SERVICES["grafana"]["volumes"])

    def test_nothing_of_it_listens_beyond_loopback(self):
        self.assertTrue(all(s["network_mode"] == "host" for s in self.SERVICES.values()))
        self.assertIn("--web.listen-address=127.0.0.1:9090", self.SERVICES["prometheus"]["command"])
        grafana = self.SERVICES["grafana"]["environment"]
        self.assertEqual(grafana["GF_SERVER_HTTP_ADDR"], "127.0.0.1")
        self.assertNotIn("0.0.0.0", " ".join(self.SERVICES["fp8kvd"]["command"]))


if __name__ == "__main__":
    if os.geteuid() != 0:
        print("skipped: buildah and debootstrap want root here")
        sys.exit(77)
    unittest.main()
