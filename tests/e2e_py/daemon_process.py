"""Starts the built daemon on a free loopback port and ends it; knows nothing of gRPC."""

import os
import pathlib
import select
import signal
import subprocess
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
BIN = pathlib.Path(os.environ.get("FP8KVD_BIN_DIR", ROOT / "build/release/bin"))
DEVICE = os.environ.get("FP8KVD_TEST_DEVICE", "cpu")  # tests/gpu/run sets it
START_S = 30
STOP_S = 30


class DaemonProcess:
    """One process; `config` is a textproto. stop() ends it by SIGTERM and gives its exit code."""

    def __init__(self, config, flags=(), port=0, http_address=""):
        self._directory = tempfile.TemporaryDirectory(prefix="fp8kvd_e2e_")
        directory = pathlib.Path(self._directory.name)
        (directory / "config.textproto").write_text(config)
        port_file = directory / "port"
        self.log_path = directory / "log"
        with open(self.log_path, "wb") as log:
            self.process = subprocess.Popen(
                [BIN / "fp8kvd", f"--config={directory}/config.textproto", f"--device={DEVICE}",
                 f"--listen_address=127.0.0.1:{port}", f"--http_address={http_address}",
                 f"--port_file={port_file}",
                 f"--shm_socket={directory}/shm", *flags],
                stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
        self.port = self._wait_for_port(port_file)
        self.address = f"127.0.0.1:{self.port}"

    def _wait_for_port(self, port_file):
        deadline = time.monotonic() + START_S
        exited = os.pidfd_open(self.process.pid)
        try:
            while time.monotonic() < deadline:
                if port_file.exists() and port_file.read_text().strip():
                    return int(port_file.read_text())
                if select.select([exited], [], [], 0.02)[0]:
                    break
        finally:
            os.close(exited)
        self.process.kill()
        self.process.wait()
        raise RuntimeError(f"fp8kvd did not become ready; its log:\n{self.log()}")

    def log(self):
        return self.log_path.read_text(errors="replace")

    def kill(self):
        """Ends it without a word to its clients."""
        self.process.kill()
        self.process.wait()
        self._directory.cleanup()

    def stop(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            code = self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            code = "killed after SIGTERM was not obeyed"
        log = self.log()
        self._directory.cleanup()
        if code != 0:
            raise RuntimeError(f"fp8kvd ended with {code}; its log:\n{log}")
