"""The daemon's life as its keepers see it: systemd's notices, SIGHUP, drain under load, a second
one, a crash, limits."""

import os
import pathlib
import re
import resource
import select
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
import unittest
import urllib.error

import grpc

import tools
from daemon_process import BIN, DaemonProcess
from harness import CONFIG, Daemon, TestCase, kv, kv_grpc
from tools import get, need, run, wait_until


# What a client does on the unix socket, with nothing of ours (proto/fp8kvd/v1/shared_memory.h).
OPEN_SESSION = """
import mmap, socket, struct, sys
door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
try:
    door.connect(sys.argv[1])
except PermissionError:
    sys.exit(print("kept out"))
door.send(struct.pack("<II64sQ", 0x4D485346, 1, sys.argv[2].encode(), 1 << 20))
welcome, (memory,), *_ = socket.recv_fds(door, 1024, 1)
mmap.mmap(memory, struct.unpack_from("<Q", welcome, 8)[0]).write(b"x")
print("session")
"""


class Manager:
    """A service manager's end of sd_notify."""

    def __init__(self, address):
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(address)
        self.socket.settimeout(tools.WAIT_S)

    def next(self, unlike=b"WATCHDOG=1"):
        """The next notice other than signs of life."""
        while True:
            notice = self.socket.recv(4096)
            if notice != unlike:
                return notice.decode()

    def alive(self, seconds):
        """Signs of life within so long."""
        count, deadline = 0, time.monotonic() + seconds
        while select.select([self.socket], [], [], max(0, deadline - time.monotonic()))[0]:
            count += self.socket.recv(4096) == b"WATCHDOG=1"
        return count


class Life(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="fp8kvd_life_")
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def start(self, config=CONFIG, environment=None, **more):
        """A daemon whose configuration file the test may rewrite."""
        self.config = self.folder / "config.textproto"
        self.config.write_text(config)
        log = open(self.folder / "log", "wb")
        self.addCleanup(log.close)
        process = subprocess.Popen(
            [BIN / "fp8kvd", f"--config={self.config}", "--device=cpu", "--http_address=",
             "--listen_address=127.0.0.1:0"], stdout=log, stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL, env={**os.environ, **(environment or {})}, **more)
        self.addCleanup(process.wait)
        self.addCleanup(process.kill)
        self.wait_for("is ready on")
        return process

    def log(self):
        return (self.folder / "log").read_text()

    def wait_for(self, text):
        wait_until(lambda: text in self.log(), f'"{text}" in the log')

    @unittest.skipIf(os.geteuid() != 0, "needs root, to be other users")
    def test_the_units_group_shares_memory_and_others_are_kept_out(self):
        """The runtime folder, the socket and the settings are those that the unit has; a client of
        another user opens a session if that user is in the group."""
        group, stranger = 54321, 54322
        folder = pathlib.Path(tempfile.mkdtemp(prefix="fp8kvd_life_", dir="/run"))
        self.addCleanup(shutil.rmtree, folder)
        os.chown(folder, 0, group)
        folder.chmod(int(Unit.setting("RuntimeDirectoryMode"), 8))
        self.start(group=group, environment={
            "RUNTIME_DIRECTORY": str(folder),
            **dict(word.split("=", 1) for word in Unit.settings("Environment"))})
        (port,) = re.findall(r"is ready on 127\.0\.0\.1:(\d+)", self.log())
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = kv_grpc.DecodeAttentionStub(channel)
            for groups, wanted in (([group], "session\n"), ([], "kept out\n")):
                ticket = stub.OpenSharedMemory(kv.OpenSharedMemoryRequest())
                self.assertEqual(pathlib.Path(ticket.unix_socket).parent, folder)
                self.assertEqual(
                    run("/usr/bin/python3", "-I", "-c", OPEN_SESSION, ticket.unix_socket,
                        ticket.ticket, user=stranger, group=stranger, extra_groups=groups),
                    (0, wanted))

    def test_systemd_hears_of_every_change_and_that_it_is_alive(self):
        for address in (str(self.folder / "notify"), f"\0fp8kvd-test-{os.getpid()}"):
            manager = Manager(address)
            process = self.start(environment={
                "NOTIFY_SOCKET": address.replace("\0", "@"), "WATCHDOG_USEC": "300000"})
            self.assertEqual(manager.next(), "READY=1\nSTATUS=serves")
            self.assertGreaterEqual(manager.alive(1.0), 3)
            process.send_signal(signal.SIGHUP)
            self.assertTrue(manager.next().startswith("RELOADING=1\n"))
            self.assertTrue(manager.next().startswith("READY=1\n"))
            process.send_signal(signal.SIGTERM)
            self.assertEqual(manager.next(), "STOPPING=1\nSTATUS=draining: new work is refused")
            self.assertEqual(process.wait(tools.WAIT_S), 0)
            manager.socket.close()

    def test_systemd_is_asked_for_the_time_that_a_snapshot_takes(self):
        manager = Manager(str(self.folder / "notify"))
        (self.folder / "snapshots").mkdir()
        process = self.start(
            CONFIG + f'drain {{ snapshot_dir: "{self.folder}/snapshots" snapshot_ms_max: 7000 }}',
            environment={"NOTIFY_SOCKET": str(self.folder / "notify")})
        self.assertEqual(manager.next(), "READY=1\nSTATUS=serves")
        process.send_signal(signal.SIGTERM)
        self.assertTrue(manager.next().startswith("STOPPING=1\n"))
        self.assertEqual(manager.next(),
                         "EXTEND_TIMEOUT_USEC=12000000\nSTATUS=saves its sequences")
        self.assertEqual(process.wait(tools.WAIT_S), 0)
        manager.socket.close()

    def test_sighup_takes_over_the_log_level_and_names_what_needs_a_restart(self):
        process = self.start()
        self.config.write_text(CONFIG + "log { log_level: warning }\nengine { cpu_threads: 1 }\n")
        process.send_signal(signal.SIGHUP)
        self.wait_for("log_level was info and is warning")
        self.wait_for("need a restart: cpu_threads")
        self.assertNotIn("configuration was read again", self.log())  # info is off now
        self.config.write_text(CONFIG.replace("layers: 2", "layers: 3", 1))
        process.send_signal(signal.SIGHUP)
        self.wait_for("log_level was warning and is info")
        self.wait_for("need a restart: models or tenants")

    def test_sighup_with_a_wrong_file_changes_nothing(self):
        process = self.start()
        self.config.write_text(CONFIG + "log { log_level: loud }\n")
        process.send_signal(signal.SIGHUP)
        self.wait_for("nothing has changed, the configuration is refused")
        self.assertIn("log_level", self.log().split("refused")[1])
        process.send_signal(signal.SIGTERM)
        self.assertEqual(process.wait(tools.WAIT_S), 0)

    def test_limits_are_raised_and_stated(self):
        def limit():
            _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        process = self.start(preexec_fn=limit)
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        self.assertEqual(resource.prlimit(process.pid, resource.RLIMIT_NOFILE), (hard, hard))
        self.assertRegex(self.log(), rf"limits: {hard} open files, core files off, oom_score_adj ")

    def test_after_a_crash_the_next_one_starts_in_the_same_place(self):
        port = tools.free_port()
        first = DaemonProcess(CONFIG, port=port)
        with socket.create_connection(("127.0.0.1", port)):  # leaves a connection behind
            before = set(pathlib.Path("/dev/shm").iterdir())
            first.kill()
        second = DaemonProcess(CONFIG, port=port)
        self.assertEqual(set(pathlib.Path("/dev/shm").iterdir()) - before, set())
        second.stop()

    def test_a_second_one_on_the_http_port_says_so_and_exits(self):
        http = f"127.0.0.1:{tools.free_port()}"
        first = DaemonProcess(CONFIG, http_address=http)
        self.addCleanup(first.stop)
        (self.folder / "second.textproto").write_text(CONFIG)
        status, said = run(
            BIN / "fp8kvd", f"--config={self.folder}/second.textproto", "--device=cpu",
            "--listen_address=127.0.0.1:0", f"--http_address={http}")
        self.assertEqual(status, 1)
        self.assertIn(f"cannot listen on {http} for HTTP: it is taken by another process", said)


class Drain(TestCase):
    """SIGTERM with unary calls, streams and prompts in flight."""

    @classmethod
    def setUpClass(cls):
        cls.http = f"127.0.0.1:{tools.free_port()}"
        cls.daemon = Daemon(cls.config, ["--drain_ms_max=15000"], http_address=cls.http)
        cls.stub = cls.daemon.stub
        info = cls.stub.GetServerInfo(kv.GetServerInfoRequest())
        cls.models = {model.name: model for model in info.models}

    @classmethod
    def tearDownClass(cls):
        cls.daemon.channel.close()

    def tearDown(self):
        pass  # the daemon is gone

    def clients(self, answered, ends):
        """Threads that call until the daemon refuses; what ended each goes to `ends`."""
        seqs = self.create("plain_bf16", 6) + self.create("plain_fp8_kv", 6)
        requests = [self.request([seq]) for seq in seqs]

        def unary(request):
            while True:
                self.stub.Decode(request, timeout=60)
                answered.append("unary")

        def stream(request):
            for _ in self.stub.DecodeStream((request for _ in range(1 << 30))):
                answered.append("stream")

        def until_refused(call, request):
            try:
                call(request)
                ends.append(None)
            except grpc.RpcError as error:
                ends.append(error)

        return [threading.Thread(target=until_refused, args=(stream if i % 3 == 0 else unary, r))
                for i, r in enumerate(requests)]

    def ready_code(self):
        try:
            get(f"http://{self.http}/readyz")
            return 200
        except urllib.error.HTTPError as error:
            self.assertIn("draining", error.read().decode())
            return error.code
        except OSError:
            return None

    def test_no_admitted_call_fails(self):
        answered, ends, codes = [], [], []
        threads = self.clients(answered, ends)
        for thread in threads:
            thread.start()
        wait_until(lambda: answered.count("unary") > 50 and answered.count("stream") > 50,
                   "a hundred answers")
        begin = time.monotonic()
        self.daemon.process.send_signal(signal.SIGTERM)
        while (code := self.ready_code()) is not None and len(codes) < 10000:
            codes.append(code)
        self.assertEqual(self.daemon.process.wait(tools.WAIT_S), 0)
        self.assertLess(time.monotonic() - begin, 15)
        for thread in threads:
            thread.join()
        # A client sees a refusal of what it sends afterwards, and nothing else.
        self.assertEqual({error.code() for error in ends if error}, {grpc.StatusCode.UNAVAILABLE})
        self.assertIn(503, codes)
        log = self.daemon.log()
        taken, done, failed = map(int, next(
            line for line in log.splitlines() if "drained:" in line).split("drained: ")[1]
            .replace(" requests taken", "").replace(" answered", "")
            .replace(" of them with an error", "").split(", "))
        self.assertGreater(taken, 100)
        self.assertEqual((done, failed), (taken, 0), log)


class Unit(unittest.TestCase):
    """The systemd unit, by systemd's own checks; and the package that brings it."""

    TEXT = (tools.DEPLOY / "fp8kvd.service").read_text()

    @classmethod
    def settings(cls, name):
        return re.findall(f"^{name}=(.*)$", cls.TEXT, re.MULTILINE)

    @classmethod
    def setting(cls, name):
        (only,) = cls.settings(name)
        return only

    def in_root(self):
        """A root directory for systemd-analyze with the unit and what it starts."""
        folder = tempfile.TemporaryDirectory(prefix="fp8kvd_unit_")
        self.addCleanup(folder.cleanup)
        unit = pathlib.Path(folder.name, "fp8kvd.service")
        unit.write_text(self.TEXT.replace("/usr/bin/fp8kvd", str(BIN / "fp8kvd")))
        return unit

    def test_systemd_takes_it(self):
        status, said = run(need("systemd-analyze"), "verify", "--man=no", self.in_root())
        self.assertEqual((status, [line for line in said.splitlines() if "fp8kvd" in line]),
                         (0, []), said)

    def test_it_may_do_little(self):
        status, said = run(need("systemd-analyze"), "security", "--offline=true",
                           "--threshold=20", self.in_root())
        self.assertEqual(status, 0, said.splitlines()[-1])

    def test_a_wrong_configuration_is_not_tried_again(self):
        self.assertIn("RestartPreventExitStatus=2\n", self.TEXT)
        status, _ = run(BIN / "fp8kvd", "--no_such_flag=1")
        self.assertEqual(status, 2)

    def test_it_waits_longer_for_the_end_than_the_drain_takes(self):
        options = (tools.ROOT / "config/options.h").read_text()
        most_ms = sum(int(options.split(f"int32_t {name} = ")[1].split(";")[0])
                      for name in ("drain_ms_max", "snapshot_ms_max"))
        stop_s = int(self.TEXT.split("TimeoutStopSec=")[1].split("\n")[0])
        self.assertGreater(stop_s * 1000, most_ms + 5000)


if __name__ == "__main__":
    unittest.main()
