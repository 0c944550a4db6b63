"""The end-to-end suite of tests/e2e_py through the proxies that people put in front: HAProxy and
nginx, with the configurations of deploy/proxy but for ports and logs."""

import pathlib
import socket
import sys
import tempfile
import unittest

import grpc

import tools
import harness
from tools import DEPLOY, need, run, wait_until


def write_configuration(name, folder, port, daemon_port, http_port):
    """deploy's own, with these ports."""
    text = (DEPLOY / "proxy" / name).read_text()
    for old, new in (("50061", port), ("50051", daemon_port), ("50052", http_port)):
        if old in text:
            text = text.replace(old, str(new))
        elif name != "nginx.conf":  # nginx asks nobody's /readyz
            raise RuntimeError(f"deploy/proxy/{name} does not name port {old}")
    path = pathlib.Path(folder, name)
    path.write_text(text)
    return path


def haproxy(config, folder):
    return [need("haproxy"), "-db", "-f", config]


def nginx(config, folder):
    """Nothing of it lands outside the folder."""
    paths = "".join(f" {kind}_temp_path {folder}/{kind};"
                    for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))
    config.write_text(config.read_text().replace("http {", f"http {{{paths}", 1))
    return [need("nginx"), "-e", "stderr", "-p", folder, "-c", config, "-g",
            f"daemon off; pid {folder}/pid;"]


PROXIES = {"haproxy.cfg": haproxy, "nginx.conf": nginx}


def listens(port):
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


class ProxiedDaemon(harness.Daemon):
    """A daemon whose channel goes through the proxy of `configuration`."""

    configuration = ""

    def __init__(self, config=harness.CONFIG, flags=()):
        http_port, port = tools.free_port(), tools.free_port()
        super().__init__(config, flags, http_address=f"127.0.0.1:{http_port}")
        self.channel.close()
        self._folder = tempfile.TemporaryDirectory(prefix="fp8kvd_proxy_")
        folder = self._folder.name
        path = write_configuration(self.configuration, folder, port, self.port, http_port)
        self._proxy = tools.running(PROXIES[self.configuration](path, folder), f"{folder}/log")
        self._proxy.__enter__()
        wait_until(lambda: listens(port), "the proxy")
        self.address = f"127.0.0.1:{port}"
        self.channel = grpc.insecure_channel(
            self.address, options=[("grpc.max_receive_message_length", -1),
                                   ("grpc.max_send_message_length", -1)])
        self.stub = harness.kv_grpc.DecodeAttentionStub(self.channel)
        try:
            wait_until(self.is_reached, "the daemon behind the proxy")
        except BaseException:
            print(pathlib.Path(folder, "log").read_text())
            self.stop()
            raise

    def is_reached(self):
        try:
            return self.stub.GetServerInfo(harness.kv.GetServerInfoRequest(), timeout=5)
        except grpc.RpcError:
            return None

    def stop(self):
        self.channel.close()
        self._proxy.__exit__(None, None, None)
        self._folder.cleanup()
        super().stop()


class WrongHeaders(harness.TestCase):
    """Headers that end a gRPC 1.51 server by the book (CVE-2023-1428): ours stays, and so do those
    behind a proxy, which refuses them."""

    def test_they_do_not_end_the_daemon(self):
        for header in ("te: x", "grpclb_client_stats: x"):
            for size in (9000, 20000):
                status, said = run(
                    need("curl"), "-s", "-o", "/dev/null", "--http2-prior-knowledge", "-X", "POST",
                    "--max-time", "10", "-H", header, "-H", "content-type: application/grpc",
                    "-H", "big: " + "x" * size,
                    f"http://{self.daemon.address}/fp8kvd.v1.DecodeAttention/GetServerInfo")
                self.assertNotEqual(status, 28, f"{header}, {size} bytes: no answer. {said}")
        self.assertTrue(self.stub.GetServerInfo(harness.kv.GetServerInfoRequest()).version)
        self.assertIsNone(self.daemon.process.poll())


class Configurations(unittest.TestCase):
    """As they stand, the proxies take them."""

    def test_haproxy_takes_its_own(self):
        status, said = run(need("haproxy"), "-c", "-f", DEPLOY / "proxy/haproxy.cfg")
        self.assertEqual(status, 0, said)

    def test_nginx_takes_its_own(self):
        with tempfile.TemporaryDirectory() as folder:
            config = pathlib.Path(folder, "nginx.conf")
            config.write_text((DEPLOY / "proxy/nginx.conf").read_text())
            command = nginx(config, folder)
            status, said = run(*command, "-t")
        self.assertEqual(status, 0, said)


def main():
    direct = unittest.TestLoader().loadTestsFromTestCase(WrongHeaders)
    passed = unittest.TextTestRunner().run(direct).wasSuccessful()
    harness.Daemon = ProxiedDaemon
    import decode_test  # noqa: E402  their cases make the daemon that stands in harness now
    import errors_test
    import info_test
    import sequences_test
    loader = unittest.TestLoader()
    suites = [("configurations", loader.loadTestsFromTestCase(Configurations))]
    for name in PROXIES:
        suites += [(name, loader.loadTestsFromModule(module))
                   for module in (decode_test, sequences_test, errors_test, info_test)]
        suites.append((name, loader.loadTestsFromTestCase(WrongHeaders)))
    for name, suite in suites:
        ProxiedDaemon.configuration = name
        print(f"== {name}: {suite.countTestCases()} tests", flush=True)
        passed = unittest.TextTestRunner(verbosity=1).run(suite).wasSuccessful() and passed
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
