"""deploy/Dockerfile, built and run without a docker engine: buildah on a base that debootstrap
makes of this machine's own release, the package of this build, podman. Needs root; skipped
without."""

import json
import os
import pathlib
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
BYTES_ABOVE_BASE_MAX = 200_000_000


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
            cls.addClassCleanup(run, need("rm"), "-rf", "--one-file-system", folder)
        cls.addClassCleanup(cls.podman, "rm", "-fa")
        cls.make_base()
        cls.must(need("cpack"), "-G", "DEB", "-B", cls.folder / "context/build/deb", "--config",
                 BUILD / "CPackConfig.cmake")
        shutil.copytree(DEPLOY, cls.folder / "context/deploy")
        cls.must(*cls.store("buildah"), "build", "--isolation", "chroot", "--network", "host",
                 "--build-arg", "BASE=localhost/base", "--build-arg", "PACKAGE=ready",
                 "-f", cls.folder / "context/deploy/Dockerfile", "-t", IMAGE,
                 cls.folder / "context")

    @classmethod
    def store(cls, tool):
        """The tool's command, with images and containers in our folders."""
        return [need(tool), "--root", cls.folder / "store", "--runroot", cls.run_folder,
                "--storage-driver", "vfs"]

    @classmethod
    def must(cls, *command):
        done = subprocess.run([str(word) for word in command], stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, text=True, timeout=250, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"{command[0]} failed:\n{done.stdout[-4000:]}")
        return done.stdout

    @classmethod
    def podman(cls, *words, **options):
        return run(*cls.store("podman"), "--cgroup-manager", "cgroupfs", "--events-backend", "none",
                   "--runtime", "runc", *words, **options)

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
