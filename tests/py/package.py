"""Builds the wheel of client/python and puts it on sys.path: import this before fp8kvd."""

import fcntl
import hashlib
import os
import pathlib
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
SOURCES = ROOT / "client/python"
PROTOS = sorted((ROOT / "proto/fp8kvd/v1").glob("*.proto"))
BIN = pathlib.Path(os.environ.get("FP8KVD_BIN_DIR", ROOT / "build/release/bin"))
BUILD = pathlib.Path(os.environ.get("FP8KVD_BUILD_DIR", ROOT / "build/release")) / "python"
SITE = BUILD / "site"
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
PIP_S = 120


def _sources():
    made = {"build", "__pycache__", "v1"}
    files = (path for path in SOURCES.rglob("*") if path.is_file())
    return sorted(path for path in files if not made & set(path.relative_to(SOURCES).parts)
                  and ".egg-info" not in str(path))


def _copy_of_checkout():
    """client/python and the proto as a checkout has them, where building leaves no trace."""
    checkout = BUILD / "checkout"
    shutil.rmtree(checkout, ignore_errors=True)
    for path in [*_sources(), *PROTOS]:
        target = checkout / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    return checkout / "client/python"


def install():
    """Builds and installs, unless the sources are those of the last time. Returns the wheel."""
    BUILD.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256(sys.version.encode())
    for path in [*_sources(), *PROTOS]:
        digest.update(f"{path}\0".encode() + path.read_bytes())
    stamp = BUILD / "installed.sha256"
    with open(BUILD / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the tests of one build start together
        if not stamp.exists() or stamp.read_text() != digest.hexdigest():
            stamp.unlink(missing_ok=True)
            shutil.rmtree(BUILD / "wheel", ignore_errors=True)
            shutil.rmtree(SITE, ignore_errors=True)
            subprocess.run([*PIP, "wheel", "--no-build-isolation", "--no-deps", "--no-index",
                            "-w", BUILD / "wheel", _copy_of_checkout()], check=True, timeout=PIP_S)
            (wheel,) = (BUILD / "wheel").glob("*.whl")
            subprocess.run([*PIP, "install", "--no-deps", "--no-index", "--target", SITE, wheel],
                           check=True, timeout=PIP_S)
            stamp.write_text(digest.hexdigest())
    (wheel,) = (BUILD / "wheel").glob("*.whl")
    return wheel


os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # tests close connections and refuse certificates
WHEEL = install()
sys.path[:0] = [str(SITE), str(ROOT / "tests/e2e_py")]
