#!/usr/bin/env python3
"""The daemon on a GPU, end to end: starts it, puts clients on it, and writes what they saw.

    bench/daemon_gpu.py --bin=build/release/bin --out=docs/measurements/daemon_h200.json

Runs on the GPU node alone, standard library only. --prefix is put before every program that is not
static, for a node without our libraries ("lib/ld-linux-x86-64.so.2 --library-path lib").
  step     fp8kv_step_bench: a step through the backend alone
  replay   fp8kvctl replay of the captures in tests/data, held against their contract
  agree    daemon_agree: this daemon and one with --device=cpu answer alike
  rpc      rpc_bench --target: calls and bytes against a raw gRPC echo in the same run
  bench    fp8kvctl bench --breakdown: where a call's time goes
  load     daemon_bench: many clients, long sequences; the mean batch
  transports  daemon_bench over gRPC and over shared memory: one item, and batches of 128
"""

import argparse
import contextlib
import json
import pathlib
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parent.parent
# A decode of 128 sequences of 2,048 tokens, 64/8 heads, fp8_kv: cell A of kernels_h200.json. This
# times the calls a second is the part of the time in which attention kernels run.
KERNEL_US_128 = 129.8
BENCH_MODEL = """
server { listen_address: "127.0.0.1:0" http_address: "127.0.0.1:%(http)d" }
engine { device: %(device)s staging_bytes: 536870912 }
cache { seqs_max: 1024 seq_len_max: 524288 }
policy { allow_fp8_kv: true }
models {
  name: "bench" layers: 8 q_heads: 64 kv_heads: 8 head_dim: 128
  expected_seqs: %(seqs)d expected_tokens: 33024 precision: fp8_kv
}
"""


class Programs:
    def __init__(self, folder, prefix):
        self.folder, self.prefix = pathlib.Path(folder), shlex.split(prefix)

    def argv(self, name, *args):
        static = name in ("fp8kv_step_bench",)
        return [*([] if static else self.prefix), str(self.folder / name), *map(str, args)]

    def run(self, name, *args, timeout=120, check=True):
        done = subprocess.run(self.argv(name, *args), capture_output=True, text=True,
                              timeout=timeout, check=False)
        if check and done.returncode != 0:
            raise RuntimeError(f"{name} {args}: exit code {done.returncode}\n{done.stdout[-2000:]}"
                               f"\n{done.stderr[-2000:]}")
        return done.stdout


@contextlib.contextmanager
def daemon(programs, config, log):
    """A daemon of this configuration; gives its address. It must end with exit code 0."""
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        (folder / "config.textproto").write_text(config)
        port_file = folder / "port"
        process = subprocess.Popen(
            programs.argv("fp8kvd", f"--config={folder / 'config.textproto'}",
                          f"--port_file={port_file}"),
            stdout=log, stderr=subprocess.STDOUT)
        try:
            started = time.monotonic()
            while not port_file.exists():
                if process.poll() is not None or time.monotonic() - started > 90:
                    raise RuntimeError(f"fp8kvd does not start, see {log.name}")
                time.sleep(0.05)
            yield "127.0.0.1:" + port_file.read_text().strip()
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
            code = process.wait(timeout=60)
        if code != 0:
            raise RuntimeError(f"fp8kvd ended with {code}, see {log.name}")


def example_config(device):
    text = (ROOT / "deploy/example.textproto").read_text()
    text = text.replace("device: auto", f"device: {device}")
    return text.replace("127.0.0.1:50051", "127.0.0.1:0").replace(
        'http_address: "127.0.0.1:50052"', 'http_address: ""')


def steps(programs, _args, out, _log):
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "steps.json"
        programs.run("fp8kv_step_bench", f"--json={file}")
        out["steps"] = json.loads(file.read_text())
    out["device"] = out["steps"]["device"]


def captures(programs, _args, out, log):
    files = sorted(str(path) for path in (ROOT / "tests/data/captures").glob("*.safetensors"))
    with daemon(programs, example_config("cuda"), log) as gpu:
        out["replay"] = json.loads(programs.run("fp8kvctl", "replay", f"--target={gpu}", "--json",
                                                *files))
        with daemon(programs, example_config("cpu"), log) as cpu:
            out["agree"] = json.loads(programs.run("daemon_agree", gpu, cpu))


def free_port():
    with socket.socket() as door:
        door.bind(("127.0.0.1", 0))
        return door.getsockname()[1]


def metric(http, name):
    with urllib.request.urlopen(f"http://127.0.0.1:{http}/metrics", timeout=10) as reply:
        for line in reply.read().decode().splitlines():
            if line.startswith(name + " "):
                return float(line.split()[1])
    raise RuntimeError(f"no metric {name}")


def load(programs, gpu, **flags):
    text = programs.run("daemon_bench", gpu, *(f"--{key}={value}" for key, value in flags.items()))
    return json.loads(text)


def calls(programs, args, out, log):
    http = free_port()
    config = BENCH_MODEL % {"device": "cuda", "seqs": args.seqs, "http": http}
    with daemon(programs, config, log) as gpu:
        taken = metric(http, "fp8kvd_device_allocations_total")
        out["rpc"] = json.loads(programs.run("rpc_bench", f"--target={gpu}"))
        out["bench"] = [
            json.loads(programs.run("fp8kvctl", "bench", f"--target={gpu}", "--json",
                                    "--breakdown", "--seconds=2", f"--batch={batch}",
                                    f"--seq_len={seq_len}", f"--in_flight={in_flight}"))
            for batch, seq_len, in_flight in ((1, 1024, 1), (8, 1024, 1), (64, 1024, 1),
                                              (128, 2048, 1), (128, 2048, 4))]
        out["load"] = [
            load(programs, gpu, clients=1, seq_len=32768, prompts=1, steps=60),
            load(programs, gpu, clients=64, seq_len=32768, prompts=args.prompts, steps=60)]
        out["transports"] = [
            load(programs, gpu, clients=clients, batch=batch, seq_len=seq_len, prompts=prompts,
                 steps=count, transport=transport)
            for clients, batch, seq_len, prompts, count in ((1, 1, 1024, 1, 250),
                                                            (4, 128, 2048, 8, 60))
            for transport in ("grpc", "shared_memory")]
        out["allocations_after_ready"] = metric(http, "fp8kvd_device_allocations_total") - taken
        if out["allocations_after_ready"] != 0:
            raise RuntimeError("the daemon took device memory after it was ready")


def summarize(out):
    """The figures that are compared over time, as plain numbers beside what they come from."""
    if "steps" in out:
        out["step_us_p50"] = next(
            cell["us_p50"] for cell in out["steps"]["latency"]
            if cell["items"] == 1 and cell["append"] and cell["precision"] == "fp8_kv"
            and cell["way"] == "default")
    if "rpc" in out:
        out["grpc_bidi_us_p50"] = out["rpc"]["bidi1_p50_kv1024"]["daemon"]
        out["grpc_echo_us_p50"] = out["rpc"]["bidi1_p50_kv1024"]["echo"]
        out["grpc_bytes_over_echo"] = out["rpc"]["bidi4_128_items"]["ratio"]
        out["append_over_upload_grpc"] = out["rpc"]["upload_1mib_chunks"]["ratio"]
    if "load" in out:
        out["mean_batch_64_clients"] = out["load"][1]["batch_items_mean"]
    if "transports" in out:
        one, many = out["transports"][1], out["transports"][3]
        out["shm_us_p50"] = one["us_p50"]
        out["kernel_busy_ratio_shm"] = many["calls_per_s"] * KERNEL_US_128 / 1e6
        if "steps" in out:
            out["append_over_h2d_shm"] = many["append_gbps"] / out["steps"]["bus_gbps"]["in"]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bin", default=str(ROOT / "build/release/bin"))
    parser.add_argument("--prefix", default="")
    parser.add_argument("--out", required=True)
    parser.add_argument("--commit", default="")
    parser.add_argument("--seqs", type=int, default=72, help="of 33,024 tokens in the pool")
    parser.add_argument("--prompts", type=int, default=4, help="that the 64 sequences fork from")
    args = parser.parse_args()
    programs = Programs(args.bin, args.prefix)
    out = {"commit": args.commit, "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
    failed = []
    with open(args.out + ".log", "w") as log:
        for part in (steps, captures, calls):
            try:
                part(programs, args, out, log)
            except Exception as error:  # the other parts are worth having
                failed.append(f"{part.__name__}: {error}")
    summarize(out)
    pathlib.Path(args.out).write_text(json.dumps(out, indent=1) + "\n")
    for key, value in out.items():
        if isinstance(value, float):
            print(f"{key}: {value}")
    for line in failed:
        print(line, file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
