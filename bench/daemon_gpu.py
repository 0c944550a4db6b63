#!/usr/bin/env python3
"""The daemon on a GPU, end to end: starts it, puts clients on it, and writes what they saw.

    bench/daemon_gpu.py --bin=build/release/bin --out=docs/measurements/daemon_h200.json

Runs on the GPU node alone, standard library only, in some five minutes. --prefix is put before
every program that is not static, for a node without our libraries ("lib/ld-linux-x86-64.so.2
--library-path lib"). --rehearse runs all that needs no GPU in a tenth of the size: fp8kvd_timed
stands for the daemon, a daemon on the CPU answers the captures; its figures mean nothing.
--two_gpus, on a node with two, runs the part of that name alone and adds it to what --out holds.
  step     fp8kv_step_bench: a step through the backend alone
  replay   fp8kvctl replay of the captures in tests/data, held against their contract
  agree    daemon_agree: this daemon and one with --device=cpu answer alike
  rpc      rpc_bench --target: calls and bytes against a raw gRPC echo in the same run
  bench    fp8kvctl bench --breakdown: where a call's time goes
  one      daemon_bench: one item at a time, over gRPC and shared memory in turns
  busy     daemon_bench: batches of 128 over shared memory, by processes and groups of each
  append   daemon_bench: prompts over shared memory, by processes
  beside   daemon_bench: one item at a time over shared memory, alone and beside such prompts
  crowd    daemon_bench: 64 clients of long sequences over gRPC, by pollers and processes
  two_gpus  daemon_bench: long sequences in batches over shared memory, on GPU 0, on GPUs 0 and 1,
           and on GPU 0 again
"""

import argparse
import contextlib
import json
import pathlib
import shlex
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request

CONGESTION = pathlib.Path("/proc/sys/net/ipv4/tcp_congestion_control")  # of loopback, too
ROOT = pathlib.Path(__file__).resolve().parent.parent
# A decode of 128 sequences of 2,048 tokens, 64/8 heads, fp8_kv: cell A of kernels_h200.json. This
# times the calls a second is the part of the time in which attention kernels run.
KERNEL_US_128 = 129.8
BENCH_MODEL = """
server { listen_address: "127.0.0.1:0" http_address: "127.0.0.1:%(http)d" }
# A message of 128 items takes a slot of 16 MiB: nine of them.
engine { device: %(device)s devices: "%(devices)s" staging_bytes: 2147483648 }
cache { seqs_max: 2048 seq_len_max: 524288 }
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
def daemon(programs, config, log, *flags, program="fp8kvd"):
    """A daemon of this configuration; gives its address. It must end with exit code 0."""
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        (folder / "config.textproto").write_text(config)
        port_file = folder / "port"
        process = subprocess.Popen(
            programs.argv(program, f"--config={folder / 'config.textproto'}",
                          f"--port_file={port_file}", *flags),
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


def steps(programs, args, out, _log):
    if args.rehearse:
        out["device"] = "none"
        return
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "steps.json"
        programs.run("fp8kv_step_bench", f"--json={file}")
        out["steps"] = json.loads(file.read_text())
    out["device"] = out["steps"]["device"]


def captures(programs, args, out, log):
    files = sorted(str(path) for path in (ROOT / "tests/data/captures").glob("*.safetensors"))
    device = "cpu" if args.rehearse else "cuda"
    with daemon(programs, example_config(device), log) as gpu:
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


class Bench:
    """Daemons of the model that the loads are made for."""

    def __init__(self, programs, args, log):
        self.programs, self.args, self.log = programs, args, log
        self.http = free_port()

    def daemon(self, *flags, devices="0"):
        config = BENCH_MODEL % {"device": "auto" if self.args.rehearse else "cuda",
                                "devices": devices, "seqs": self.args.seqs, "http": self.http}
        return daemon(self.programs, config, self.log, *flags,
                      program="fp8kvd_timed" if self.args.rehearse else "fp8kvd")

    def scaled(self, count):
        return max(1, count // 10) if self.args.rehearse else count

    def argv(self, target, **flags):
        return self.programs.argv("daemon_bench", target,
                                  *(f"--{key}={value}" for key, value in flags.items()))

    def load(self, target, **flags):
        """What daemon_bench prints, and the mean rows of the launches meanwhile."""
        before = [metric(self.http, name) for name in LAUNCHED]
        done = subprocess.run(self.argv(target, **flags), capture_output=True, text=True,
                              timeout=120, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"daemon_bench {flags}: {done.stderr[-2000:]}")
        rows, launches = (metric(self.http, name) - old for name, old in zip(LAUNCHED, before))
        return {**json.loads(done.stdout), "rows_per_launch": round(rows / max(1, launches), 2)}


LAUNCHED = ("fp8kvd_rows_total", 'fp8kvd_launches_total{kind="decode"}')
SHM = {"transport": "shared_memory"}


def calls(programs, args, out, log):
    bench = Bench(programs, args, log)
    with bench.daemon() as target:
        taken = metric(bench.http, "fp8kvd_device_allocations_total")
        out["rpc"] = json.loads(programs.run("rpc_bench", f"--target={target}",
                                             *(["--smoke"] if args.rehearse else [])))
        out["bench"] = [
            json.loads(programs.run("fp8kvctl", "bench", f"--target={target}", "--json",
                                    "--breakdown", f"--seconds={bench.scaled(20) / 10}",
                                    f"--batch={batch}", f"--seq_len={seq_len}",
                                    f"--in_flight={in_flight}"))
            for batch, seq_len, in_flight in ((1, 1024, 1), (8, 1024, 1), (64, 1024, 1),
                                              (128, 2048, 1), (128, 2048, 4))]
        out["one"] = [bench.load(target, clients=1, steps=bench.scaled(500), transport=transport)
                      for _ in range(3) for transport in ("grpc", "shared_memory")]
        out["allocations_after_ready"] = metric(bench.http,
                                                "fp8kvd_device_allocations_total") - taken
        if out["allocations_after_ready"] != 0:
            raise RuntimeError("the daemon took device memory after it was ready")


def shared_memory(programs, args, out, log):
    bench = Bench(programs, args, log)
    out["busy"], out["append"] = [], []
    for threads in (2, 4, 8):
        with bench.daemon(f"--shm_threads={threads}") as target:
            for processes, groups in ((1, 3), (2, 3), (4, 2), (8, 1)):
                out["busy"].append({
                    "shm_threads": threads,
                    **bench.load(target, clients=processes, processes=processes, batch=128,
                                 in_flight=groups, seq_len=2048, prompts=8,
                                 steps=bench.scaled(60), **SHM)})
            for processes in (1, 4, 8):
                out["append"].append({
                    "shm_threads": threads,
                    **bench.load(target, clients=processes, processes=processes, steps=1,
                                 append_tokens=bench.scaled(32768), **SHM)})


def beside(programs, args, out, log):
    """A decode's p99 while prompts come in; they must have come from before it to its end."""
    bench = Bench(programs, args, log)
    tokens = "fp8kvd_append_tokens_total"
    out["beside"] = []
    with bench.daemon() as target:
        for _ in range(3):
            one = {"clients": 1, "steps": bench.scaled(1000), **SHM}
            alone = bench.load(target, **one)
            uploads = subprocess.Popen(
                bench.argv(target, clients=2, processes=2, steps=1,
                           append_tokens=bench.scaled(400_000), **SHM),
                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            try:
                started = metric(bench.http, tokens) + 50_000  # beyond its prompt
                while metric(bench.http, tokens) < started:
                    if uploads.poll() is not None:
                        raise RuntimeError("the uploads ended at once")
                    time.sleep(0.01)
                with_uploads = bench.load(target, **one)
                was_beside = uploads.poll() is None
            finally:
                uploads.wait(timeout=120)
            out["beside"].append({"alone": alone, "beside": with_uploads,
                                  "uploads_outlasted_it": was_beside})


def crowd(programs, args, out, log):
    bench = Bench(programs, args, log)
    seq_len = bench.scaled(32768)
    out["crowd"] = []
    for pollers, ways in ((2, (1, 16)), (4, (16,)), (8, (16, 64))):
        with bench.daemon(f"--poller_threads={pollers}") as target:
            for processes in ways:
                out["crowd"].append({
                    "poller_threads": pollers,
                    **bench.load(target, clients=64, processes=processes, seq_len=seq_len,
                                 prompts=args.prompts, steps=bench.scaled(60))})
            if pollers == 2:
                out["crowd_of_one"] = bench.load(target, clients=1, seq_len=seq_len,
                                                 steps=bench.scaled(60))


def two_gpus(programs, args, out, log):
    """16 sequences of 32,768 tokens in a call, half of them on either device: a launch takes near a
    millisecond, so that kernels are the bound, not the bus. One device before and after two, since
    what it gives may drift."""
    bench = Bench(programs, args, log)
    out["two_gpus"] = []
    for devices in ("0", "0,1", "0"):
        with bench.daemon("--shm_threads=8", devices=devices) as target:
            out["two_gpus"].append({
                "devices": devices,
                **bench.load(target, clients=8, processes=8, batch=16, in_flight=2, prompts=8,
                             seq_len=32768, steps=bench.scaled(60), **SHM)})


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
        if "bidi4_128_items" in out["rpc"]:  # not in a rehearsal
            out["grpc_bytes_over_echo"] = out["rpc"]["bidi4_128_items"]["ratio"]
        out["append_over_upload_grpc"] = out["rpc"]["upload_1mib_chunks"]["ratio"]
    if "one" in out:
        out["shm_us_p50"] = statistics.median(
            run["us_p50"] for run in out["one"] if run["transport"] == "shared_memory")
    if out.get("crowd"):
        best = max(out["crowd"], key=lambda run: run["calls_per_s"])
        out["mean_batch_64_clients"] = best["batch_items_mean"]
        out["rows_per_launch_64_clients"] = best["rows_per_launch"]
    if out.get("busy"):
        out["kernel_busy_ratio_shm"] = max(
            run["calls_per_s"] for run in out["busy"]) * KERNEL_US_128 / 1e6
    if out.get("append") and "steps" in out:
        out["append_over_h2d_shm"] = max(
            run["append_gbps"] for run in out["append"]) / out["steps"]["bus_gbps"]["in"]
    if "two_gpus" in out:
        before, two, after = (run["calls_per_s"] for run in out["two_gpus"])
        out["two_gpu_speedup"] = 2 * two / (before + after)
    ratios = [run["beside"]["us_p99"] / run["alone"]["us_p99"] for run in out.get("beside", [])
              if run["uploads_outlasted_it"]]
    if ratios:
        out["decode_p99_beside_append_shm"] = statistics.median(ratios)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bin", default=str(ROOT / "build/release/bin"))
    parser.add_argument("--prefix", default="")
    parser.add_argument("--out", required=True)
    parser.add_argument("--commit", default="")
    parser.add_argument("--seqs", type=int, default=72, help="of 33,024 tokens in the pool")
    parser.add_argument("--prompts", type=int, default=4, help="that the 64 sequences fork from")
    parser.add_argument("--rehearse", action="store_true", help="without a GPU: see above")
    parser.add_argument("--two_gpus", action="store_true", help="that part alone: see above")
    args = parser.parse_args()
    programs = Programs(args.bin, args.prefix)
    out = {"commit": args.commit, "congestion_control": CONGESTION.read_text().strip(),
           "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
    parts = (steps, captures, calls, shared_memory, beside, crowd)
    if args.two_gpus:
        parts = (two_gpus,)
        with contextlib.suppress(FileNotFoundError):
            out = {**json.loads(pathlib.Path(args.out).read_text()),
                   "two_gpus_commit": args.commit}
    failed = []
    with open(args.out + ".log", "w") as log:
        for part in parts:
            try:
                started = time.monotonic()
                part(programs, args, out, log)
                print(f"{part.__name__}: {time.monotonic() - started:.0f} s", flush=True)
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
