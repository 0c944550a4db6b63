"""The builds of CMakePresets.json as the tests see them: configure, list tests, build, run."""

import contextlib
import dataclasses
import json
import os
import re
import signal
import shutil
import subprocess
import tempfile
import time

import report
from toolchain import ROOT, VENV_PYTHON

CONFIGURE_SECONDS_MAX = 300
BUILD_SECONDS_MAX = 3600
RUN_SECONDS_MAX = 3600
# Labels that make a group of their own; every other test belongs to the group of its build.
GROUP_LABELS = ("style", "fuzz", "cuda", "hf")


@dataclasses.dataclass
class Test:
    group: str
    name: str
    budget_s: float
    targets: list  # of the build, that must be there before it runs

    @property
    def full_name(self):
        return f"{self.group}/{self.name}"


class Build:
    """One build directory. Steps print what they do and are bounded in time."""

    def __init__(self, preset, configure_arguments=()):
        self.preset = preset
        self.directory = ROOT / "build" / preset
        self._arguments = list(configure_arguments)
        self.tests = []

    def configure(self):
        """Configures and lists the tests; false when that fails."""
        command = ["cmake", "--preset", self.preset, f"-DFP8KVD_PYTHON={VENV_PYTHON}",
                   *self._arguments]
        if not _step(f"{self.preset}: configure", command, CONFIGURE_SECONDS_MAX, quiet=True):
            return False
        listing = subprocess.run(["ctest", "--test-dir", self.directory, "--show-only=json-v1"],
                                 stdout=subprocess.PIPE, check=True, timeout=60)
        self.tests = [self._test(entry) for entry in json.loads(listing.stdout)["tests"]]
        return True

    def _test(self, entry):
        properties = {p["name"]: p["value"] for p in entry.get("properties", [])}
        labels = properties.get("LABELS", [])
        group = next((label for label in labels if label in GROUP_LABELS), self.preset)
        targets = [label[len("needs="):] for label in labels if label.startswith("needs=")]
        if not targets and "script" not in labels:
            targets = [entry["name"]]
        return Test(group, entry["name"], float(properties.get("TIMEOUT", 0)), targets)

    def build(self, tests, everything):
        """Builds what the tests need, or everything; false when some of it does not build."""
        targets = sorted({target for test in tests for target in test.targets})
        if not everything and not targets:
            return True
        command = ["ninja", "-C", self.directory, "-k", "0", f"-j{os.cpu_count()}"]
        return _step(f"{self.preset}: build", command + ([] if everything else targets),
                     BUILD_SECONDS_MAX)

    def run(self, tests):
        """Runs tests of this build with ctest and returns a report.Result for each."""
        junit = self.directory / "junit.xml"
        junit.unlink(missing_ok=True)
        only = "|".join(re.escape(test.name) for test in tests)
        command = ["ctest", "--test-dir", self.directory, "--output-on-failure", "--no-tests=error",
                   f"-j{os.cpu_count()}", "-R", f"^({only})$", "--output-junit", junit,
                   "--test-output-size-passed", "1000000", "--test-output-size-failed", "1000000"]
        if self.preset == "tsan":
            command = _without_address_randomization() + command
        with temporary_folder() as folder:
            _step(f"{self.preset}: run {len(tests)} tests", command, RUN_SECONDS_MAX,
                  environment={"TMPDIR": folder})
        return report.results_from_junit(junit, tests)


@contextlib.contextmanager
def temporary_folder():
    """Where tests put what they need for a while; a test that was killed cleans nothing up."""
    folder = tempfile.mkdtemp(prefix="fp8kvd_tests_")
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _without_address_randomization():
    """Thread sanitizer of these compilers refuses a randomized address space of 32 bits."""
    prefix = ["setarch", "-R"]
    try:
        works = subprocess.run(prefix + ["true"], stderr=subprocess.DEVNULL, check=False)
    except FileNotFoundError:
        return []
    return prefix if works.returncode == 0 else []


class Beside:
    """A command that runs while other things are done; what is left of it ends with the block."""

    def __init__(self, title, command):
        self._title, self._start = title, time.monotonic()
        print(f"==> {title}: begun", flush=True)
        self._process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL,
                                         start_new_session=True)

    def wait(self, seconds):
        """Whether it succeeded, at the latest after so long."""
        try:
            status = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            status = f"not done after {seconds} s, its limit"
        word = "FAILED" if status else "done"
        print(f"==> {self._title}: {word} {time.monotonic() - self._start:.1f} s after it began",
              flush=True)
        return status == 0

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def _step(title, command, seconds, quiet=False, environment=None):
    """Runs one command under a heading; its output is shown, or only on failure when quiet."""
    print(f"==> {title}", flush=True)
    start = time.monotonic()
    try:
        status, output = run_bounded(command, seconds, quiet, environment)
    except subprocess.TimeoutExpired:
        print(f"==> {title}: stopped after {seconds} s, its limit", flush=True)
        return False
    if quiet and status != 0:
        print(output.decode(errors="replace"))
    word = "done" if status == 0 else "FAILED"
    print(f"==> {title}: {word} in {time.monotonic() - start:.1f} s", flush=True)
    return status == 0


def run_bounded(command, seconds, captured, environment=None):
    """Exit status and output of a command, which finds these variables in its environment too; past
    the limit it ends with all that it started."""
    pipe = subprocess.PIPE if captured else None
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=pipe,
                               stderr=subprocess.STDOUT if captured else None,
                               start_new_session=True, env=os.environ | (environment or {}))
    try:
        output, _ = process.communicate(timeout=seconds)
    except BaseException:  # the limit, or an interrupt: either way nothing stays behind
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
    return process.returncode, output
