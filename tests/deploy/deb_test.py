"""The Debian package: made by CPack from the build, taken apart and its daemon run."""

import os
import pathlib
import re
import subprocess
import tempfile
import unittest

from tools import DEPLOY, ROOT, need, run

BUILD = pathlib.Path(os.environ.get("FP8KVD_BUILD_DIR", ROOT / "build/release"))


class Package(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.temporary = tempfile.TemporaryDirectory(prefix="fp8kvd_deb_")
        cls.folder = pathlib.Path(cls.temporary.name)
        status, said = run(need("cpack"), "-G", "DEB", "-B", cls.folder / "made",
                           "--config", BUILD / "CPackConfig.cmake")
        if status != 0:
            raise RuntimeError(said)
        (cls.deb,) = (cls.folder / "made").glob("fp8kvd_*.deb")
        cls.root = cls.folder / "root"
        subprocess.run([need("dpkg-deb"), "-R", cls.deb, cls.root], check=True)

    @classmethod
    def tearDownClass(cls):
        cls.temporary.cleanup()

    def field(self, name):
        return run(need("dpkg-deb"), "--field", self.deb, name)[1].strip()

    def test_what_is_in_it(self):
        files = {str(path.relative_to(self.root)) for path in self.root.rglob("*")
                 if path.is_file()}
        self.assertEqual(files, {
            "DEBIAN/conffiles", "DEBIAN/control", "DEBIAN/md5sums", "DEBIAN/postinst",
            "DEBIAN/postrm", "DEBIAN/prerm", "etc/fp8kvd/fp8kvd.textproto",
            "lib/systemd/system/fp8kvd.service", "usr/bin/fp8kvctl", "usr/bin/fp8kvd",
            "usr/lib/sysusers.d/fp8kvd.conf",
            "usr/share/doc/fp8kvd/operations.md", "usr/share/doc/fp8kvd/semantics.md",
            "usr/share/doc/fp8kvd/examples/alerts.yaml",
            "usr/share/doc/fp8kvd/examples/fp8kvd.json"})

    def test_it_needs_the_libraries_that_it_links(self):
        needs = self.field("Depends")
        for library in ("libc6", "libgrpc++", "libprotobuf", "libspdlog", "libcivetweb"):
            self.assertIn(library, needs)
        self.assertRegex(self.field("Version"), r"^\d+\.\d+\.\d+$")

    def test_its_configuration_is_the_operators(self):
        self.assertEqual((self.root / "DEBIAN/conffiles").read_text(),
                         "/etc/fp8kvd/fp8kvd.textproto\n")
        unit = (self.root / "lib/systemd/system/fp8kvd.service").read_text()
        (started,) = re.findall(r"^ExecStart=(\S+) --config=(\S+)$", unit, re.MULTILINE)
        for path in started:
            self.assertTrue((self.root / path.lstrip("/")).is_file(), path)

    def test_it_makes_the_user_that_its_unit_names(self):
        unit = (self.root / "lib/systemd/system/fp8kvd.service").read_text()
        users = self.root / "usr/lib/sysusers.d/fp8kvd.conf"
        with tempfile.TemporaryDirectory(prefix="fp8kvd_users_") as root:
            (pathlib.Path(root) / "etc").mkdir()
            status, said = run(need("systemd-sysusers"), f"--root={root}", users)
            self.assertEqual(status, 0, said)
            for file, key in (("passwd", "User"), ("group", "Group")):
                names = {line.split(":")[0]
                         for line in pathlib.Path(root, "etc", file).read_text().splitlines()}
                (name,) = re.findall(f"^{key}=(.*)$", unit, re.MULTILINE)
                self.assertIn(name, names)

    def test_its_daemon_takes_its_configuration(self):
        status, said = run(self.root / "usr/bin/fp8kvd", "--check_config",
                           f"--config={self.root}/etc/fp8kvd/fp8kvd.textproto")
        self.assertEqual(status, 0, said)
        self.assertEqual(run(self.root / "usr/bin/fp8kvctl", "--help")[0], 0)

    def test_its_scripts_are_shell_that_does_nothing_without_systemd(self):
        if pathlib.Path("/run/systemd/system").is_dir():
            self.skipTest("systemd runs here: the scripts would restart a real unit")
        for script, argument in (("postinst", "configure"), ("prerm", "remove"),
                                 ("postrm", "remove")):
            path = DEPLOY / "debian" / script
            self.assertEqual(run("sh", "-n", path), (0, ""))
            self.assertEqual(run("sh", path, argument), (0, ""), script)


if __name__ == "__main__":
    unittest.main()
