"""The wheel: what is in it, what it promises to pip and to type checkers, and its examples."""

import doctest
import importlib
import pathlib
import pkgutil
import subprocess
import sys
import tempfile
import unittest
import zipfile

from package import BUILD, ROOT, SITE, WHEEL

import fp8kvd

PYTHONS = ("3.10", "3.11", "3.12", "3.13")


class Wheel(unittest.TestCase):
    def test_is_for_every_python_3_and_platform(self):
        self.assertRegex(WHEEL.name, r"^fp8kvd-[0-9.]+-py3-none-any\.whl$")

    def test_holds_every_module_the_stubs_and_the_mark_of_types(self):
        names = set(zipfile.ZipFile(WHEEL).namelist())
        sources = (ROOT / "client/python/fp8kvd").glob("*.py")
        wanted = {f"fp8kvd/{path.name}" for path in sources} | {
            "fp8kvd/py.typed", "fp8kvd/v1/__init__.py"} | {
            f"fp8kvd/v1/{stub}_pb2.{end}" for stub in ("kv", "accuracy") for end in ("py", "pyi")}
        self.assertEqual({name for name in names if ".dist-info/" not in name}, wanted)

    def test_is_what_the_import_finds(self):
        self.assertTrue(pathlib.Path(fp8kvd.__file__).is_relative_to(SITE))

    def test_a_source_distribution_builds_without_a_checkout_around_it(self):
        with tempfile.TemporaryDirectory() as folder:
            run = [sys.executable, "-c", "import setuptools.build_meta as b, sys; "
                   "b.build_sdist(sys.argv[1])", folder]
            subprocess.run(run, cwd=BUILD / "checkout/client/python", check=True, timeout=60,
                           stdout=subprocess.DEVNULL)
            (sdist,) = pathlib.Path(folder).glob("*.tar.gz")
            subprocess.run([sys.executable, "-m", "pip", "--disable-pip-version-check", "-q",
                            "wheel", "--no-build-isolation", "--no-deps", "--no-index", "-w",
                            folder, sdist], check=True, timeout=60)
            (wheel,) = pathlib.Path(folder).glob("*.whl")
            self.assertEqual(set(zipfile.ZipFile(wheel).namelist()),
                             set(zipfile.ZipFile(WHEEL).namelist()))


class Types(unittest.TestCase):
    def test_mypy_strict_finds_nothing_on_any_supported_python(self):
        for version in PYTHONS:
            with self.subTest(version):
                done = subprocess.run(
                    [sys.executable, "-m", "mypy", "--python-version", version, "--config-file",
                     ROOT / "client/python/pyproject.toml", "--cache-dir", BUILD / "mypy"],
                    cwd=SITE, capture_output=True, text=True, timeout=300)
                self.assertEqual(done.returncode, 0, done.stdout + done.stderr)


def load_tests(loader, tests, pattern):
    """The examples of the docstrings, as tests of this file."""
    for module in pkgutil.iter_modules(fp8kvd.__path__):
        if not module.ispkg and module.name != "hf":  # which needs torch, see tests/hf
            suite = doctest.DocTestSuite(importlib.import_module(f"fp8kvd.{module.name}"))
            tests.addTests(suite)
    return tests


if __name__ == "__main__":
    unittest.main()
