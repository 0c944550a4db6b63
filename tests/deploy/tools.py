"""What the tests of deploy/ share: the daemon's harness, free ports, HTTP, bounded waits."""

import contextlib
import pathlib
import shutil
import socket
import subprocess
import sys
import time
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
sys.path.insert(0, str(ROOT / "tests/e2e_py"))

WAIT_S = 30


def free_port():
    """A loopback port that nobody listens on now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def need(tool):
    """The path of a program that deploy/packages.txt brings; its lack is a failure, not a skip."""
    path = shutil.which(tool) or shutil.which(tool, path="/usr/sbin:/sbin")
    if path is None:
        raise RuntimeError(f"{tool} is not installed; run deploy/install --tests")
    return path


def get(url):
    with urllib.request.urlopen(url, timeout=10) as response:
        return response.read().decode()


def wait_until(condition, what):
    """Polls until the condition gives something true, which it returns."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        found = condition()
        if found:
            return found
        time.sleep(0.05)
    raise RuntimeError(f"{what} did not come within {WAIT_S} s")


def run(*command, **options):
    """Exit status and everything that it printed."""
    done = subprocess.run([str(word) for word in command], stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True, timeout=60, check=False, **options)
    return done.returncode, done.stdout


@contextlib.contextmanager
def running(command, log_path):
    """A server for the length of a `with`; ended by its own process id."""
    with open(log_path, "wb") as log:
        process = subprocess.Popen([str(word) for word in command], stdout=log,
                                   stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(WAIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
