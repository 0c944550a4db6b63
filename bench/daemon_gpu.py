#!/usr/bin/env python3
"""The daemon on a GPU, end to end: starts it, puts clients on it, and writes what they saw.

    bench/daemon_gpu.py --bin=build/release/bin --out=docs/measurements/daemon_h200.json

Runs on the GPU node alone, standard library only, in some five minutes. --prefix is put before
every program that is not static, for a node without our libraries ("lib/ld-linux-x86-64.so.2
--library-path lib"). --rehearse runs all that needs no GPU in a tenth of the size: fp8kvd_timed
stands for the daemon, a daemon on the CPU answers the captures; its figures mean nothing.
--parts=NAME,... runs those alone and adds them to what --out holds, each with its commit. At
SIGTERM it writes what it has. --two_gpus, on a node with two, is --parts=two_gpus.
  steps     fp8kv_step_bench: a step through the backend alone
  captures  fp8kvctl replay of the captures in tests/data, held against their contract, and
            daemon_agree: this daemon and one with --device=cpu answer alike
  rpc       rpc_bench --target: calls and bytes against a raw gRPC echo in the same run; uploads
            in five rounds, each with a daemon and an echo of its own
  one       one item at a time, over gRPC and shared memory in turns (daemon_bench), and fp8kvctl
            bench --breakdown: where a call's time goes
  busy      batches of 128 over shared memory, by processes and groups of each (daemon_bench, as
            all that follows)
  append    prompts over shared memory, by processes
  beside    one item at a time over shared memory, alone and beside such prompts; decodes of
            1,024 and of 262,144 tokens
  crowd     64 clients of long sequences, over shared memory and over gRPC, by processes
  two_gpus  long sequences in batches over shared memory, on GPU 0, on GPUs 0 and 1, and on GPU 0
            again
Sequences that are decoded at the same time never share pages: rows of one prompt would be read from
the device's memory once for all. kv_read_gbps is what decodes read of K and V, for that comparison.
"""

import argparse
import contextlib
import json
import os
import pathlib
import shlex
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import typing
import urllib.request

CONGESTION = pathlib.Path("/proc/sys/net/ipv4/tcp_congestion_control")  # of loopback, too
BOOT = pathlib.Path("/proc/sys/kernel/random/boot_id")  # says which parts were of one run
ROOT = pathlib.Path(__file__).resolve().parent.parent
BENCH_MODEL = """
server { listen_address: "127.0.0.1:0" http_address: "127.0.0.1:%(http)d" }
# With 4 GiB a message of 128 items takes a slot of 16 MiB: sixteen of them.
engine { device: %(device)s devices: "%(devices)s" staging_bytes: %(staging)d }
cache { seqs_max: 4096 seq_len_max: 524288 }
policy { allow_fp8_kv: true }
models {
  name: "bench" layers: %(layers)d q_heads: 64 kv_heads: 8 head_dim: 128
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


class Running(typing.NamedTuple):
    target: str
    pid: int

    def thread_seconds(self):
        """What each thread has had of the processors, by its id."""
        tick = os.sysconf("SC_CLK_TCK")
        seconds = {}
        for thread in pathlib.Path(f"/proc/{self.pid}/task").iterdir():
            with contextlib.suppress(FileNotFoundError):
                words = (thread / "stat").read_text().rpartition(")")[2].split()
                seconds[thread.name] = (int(words[11]) + int(words[12])) / tick
        return seconds


@contextlib.contextmanager
def daemon(programs, config, log, *flags, program="fp8kvd"):
    """A daemon of this configuration, which must end with exit code 0."""
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
            yield Running("127.0.0.1:" + port_file.read_text().strip(), process.pid)
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
    if args.steps:
        out["steps"] = json.loads(pathlib.Path(args.steps).read_text())
        out["device"] = out["steps"]["device"]
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
        out["replay"] = json.loads(programs.run("fp8kvctl", "replay", f"--target={gpu.target}",
                                                "--json", *files))
        with daemon(programs, example_config("cpu"), log) as cpu:
            out["agree"] = json.loads(programs.run("daemon_agree", gpu.target, cpu.target))


def free_port():
    with socket.socket() as door:
        door.bind(("127.0.0.1", 0))
        return door.getsockname()[1]


def metrics(http):
    """Every metric of the daemon, by name and labels."""
    with urllib.request.urlopen(f"http://127.0.0.1:{http}/metrics", timeout=10) as reply:
        lines = reply.read().decode().splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if line and not line.startswith("#"))
    return {name: float(value) for name, value in pairs}


def read_until(word, stream):
    """The lines up to one that is the word. RuntimeError with them where none is."""
    lines = []
    for line in stream:
        lines.append(line)
        if line.strip() == word:
            return "".join(lines)
    raise RuntimeError(f"no \"{word}\" came, but: {''.join(lines)[-2000:]}")


class Bench:
    """Daemons of the model that the loads are made for."""

    def __init__(self, programs, args, log):
        self.programs, self.args, self.log = programs, args, log
        self.http = free_port()

    def daemon(self, *flags, devices="0", seqs=72, layers=8, staging=4 << 30):
        """seqs: of 33,024 tokens, 0.56 GB each with 8 layers."""
        config = BENCH_MODEL % {"device": "auto" if self.args.rehearse else "cuda",
                                "devices": devices, "seqs": seqs, "layers": layers,
                                "staging": staging, "http": self.http}
        return daemon(self.programs, config, self.log, *flags,
                      program="fp8kvd_timed" if self.args.rehearse else "fp8kvd")

    def scaled(self, count):
        return max(1, count // 10) if self.args.rehearse else count

    def argv(self, running, **flags):
        return self.programs.argv("daemon_bench", running.target,
                                  *(f"--{key}={value}" for key, value in flags.items()))

    def load(self, running, said=(), **flags):
        """What daemon_bench prints, and what the daemon says of the time from when its sequences
        were filled to its last decode: means of its stages, what came of K and V, whoever sent it,
        and its threads' part of the processors."""
        with subprocess.Popen(self.argv(running, waits=1, **flags), stdin=subprocess.PIPE,
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as load:
            watch = threading.Timer(300, load.kill)
            watch.daemon = True
            watch.start()
            told = read_until("filled", load.stderr)
            began, before, threads = time.monotonic(), metrics(self.http), running.thread_seconds()
            print(file=load.stdin, flush=True)
            told += read_until("decoded", load.stderr)
            ended, after, now = time.monotonic(), metrics(self.http), running.thread_seconds()
            stdout, stderr = load.communicate("\n")
            watch.cancel()
        if load.returncode != 0:
            raise RuntimeError(f"daemon_bench {flags}: {told}{stderr[-2000:]}")
        wall_s = ended - began
        used = sorted((seconds - threads.get(name, 0)) / wall_s for name, seconds in now.items())

        def mean(total, count, scale):
            return round(scale * (after[total] - before[total]) /
                         max(1, after[count] - before[count]), 2)

        got = {**dict(said), **json.loads(stdout)}
        got = {**got,
               "rows_per_launch": mean(*LAUNCHED, 1),
               "kv_read_gbps": (after[READ] - before[READ]) / 1e9 / got["wall_s"],
               "kv_taken_gbps": round((after[TAKEN_BYTES] - before[TAKEN_BYTES]) / 1e9 / wall_s, 2),
               **{f"{part}_us_mean": mean(f"fp8kvd_{part}_seconds_sum",
                                          f"fp8kvd_{part}_seconds_count", 1e6)
                  for part in ("stage", "queue", "kernel", "reply")},
               "daemon_cores": round(sum(used), 2),
               "busiest_threads": [round(part, 2) for part in used[:-7:-1]]}
        print(f"  {json.dumps(got)}", flush=True)
        return got


LAUNCHED = ("fp8kvd_rows_total", 'fp8kvd_launches_total{kind="decode"}')
READ = 'fp8kvd_kv_read_bytes_total{model="bench"}'
TAKEN = "fp8kvd_device_allocations_total"
TAKEN_BYTES = "fp8kvd_append_bytes_total"
SHM = {"transport": "shared_memory"}


def rpc(programs, args, out, log):
    """What an upload gets depends on where the threads of that daemon and that echo came to run,
    so that one draw is no figure of the code."""
    bench = Bench(programs, args, log)
    smoke = ["--smoke"] if args.rehearse else []
    rounds = []
    for flags, staging in (([], 4 << 30), *4 * ((["--uploads"], 1 << 30),)):
        with bench.daemon(staging=staging) as running:
            measured = json.loads(programs.run("rpc_bench", f"--target={running.target}", *flags,
                                               *smoke))
        if not flags:
            out["rpc"] = measured
        rounds.append(measured["upload_1mib_chunks"])
        print(f"  {json.dumps(rounds[-1])}", flush=True)
    out["rpc"]["uploads"] = rounds


def one(programs, args, out, log):
    bench = Bench(programs, args, log)
    out["one"], out["bench"] = [], []
    with bench.daemon() as running:
        taken = metrics(bench.http)[TAKEN]
        # From 961 to 1,088 tokens: around 1,024.
        for transport in 5 * ("grpc", "shared_memory"):
            out["one"].append(bench.load(running, clients=1, seq_len=960,
                                         steps=bench.scaled(128), transport=transport))
        for batch, seq_len, in_flight in ((1, 1024, 1), (8, 1024, 1), (64, 1024, 1),
                                          (128, 2048, 3)):
            out["bench"].append(json.loads(
                programs.run("fp8kvctl", "bench", f"--target={running.target}", "--json",
                             "--breakdown", f"--seconds={bench.scaled(10) / 10}",
                             f"--batch={batch}", f"--seq_len={seq_len}",
                             f"--in_flight={in_flight}")))
            print(f"  {json.dumps(out['bench'][-1])}", flush=True)
        out["allocations_after_ready"] = metrics(bench.http)[TAKEN] - taken
        if out["allocations_after_ready"] != 0:
            raise RuntimeError("the daemon took device memory after it was ready")


def busy(programs, args, out, log):
    """2,048 sequences with pages of their own, of which two layers are used, 18 GB: a launch
    finds nothing of it in the second-level cache. They grow by a token a step, and have 2,048 in
    the middle."""
    bench = Bench(programs, args, log)
    steps = bench.scaled(250)
    out["busy"] = []
    for threads, launches, loads in ((8, 2, ((8, 2, 0), (8, 2, 1))),
                                     (8, 3, ((4, 3, 1), (8, 2, 1)))):
        with bench.daemon(f"--shm_threads={threads}",
                          f"--launches_inflight_max={launches}", seqs=144) as running:
            for processes, groups, in_place in loads:
                out["busy"].append(bench.load(
                    running, {"shm_threads": threads, "launches_inflight_max": launches,
                              "in_place": in_place},
                    clients=processes, processes=processes, batch=128, in_flight=groups,
                    seq_len=2048 - steps // 2, layers=2, steps=steps, in_place=in_place, **SHM))


def append(programs, args, out, log):
    bench = Bench(programs, args, log)
    out["append"] = []
    for threads, loads in ((2, ((1, 0), (1, 1))), (8, ((4, 0), (8, 0), (8, 1)))):
        with bench.daemon(f"--shm_threads={threads}") as running:
            for processes, in_place in loads:
                out["append"].append(bench.load(
                    running, {"shm_threads": threads, "in_place": in_place}, clients=processes,
                    processes=processes, steps=1, in_place=in_place,
                    append_tokens=bench.scaled(262144 // processes), **SHM))


@contextlib.contextmanager
def uploads(bench, running):
    """Prompts of two processes over shared memory, under way before the body, which gets the
    process and what they take of the daemon alone, GB/s."""
    argv = bench.argv(running, clients=2, processes=2, steps=1,
                      append_tokens=bench.scaled(480_000), **SHM)
    with subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            began = metrics(bench.http)[TAKEN_BYTES] + 200_000_000  # beyond its sequences'
            while (taken := metrics(bench.http)[TAKEN_BYTES]) < began:
                if process.poll() is not None:
                    raise RuntimeError("the uploads ended at once")
                time.sleep(0.01)
            since = time.monotonic()
            time.sleep(bench.scaled(10) / 100)
            gbps = (metrics(bench.http)[TAKEN_BYTES] - taken) / 1e9 / (time.monotonic() - since)
            yield process, round(gbps, 2)
        finally:
            process.wait(timeout=120)


def beside(programs, args, out, log):
    """A decode's p99 while prompts come in, which must have come from before it to its end, and
    what is left to them beside it. Short decodes, and those of one sequence that fills the device.
    A loop for each of the three sessions, and one over."""
    bench = Bench(programs, args, log)
    short = {"seq_len": 1024, "steps": bench.scaled(2000)}
    long = {"seq_len": bench.scaled(262_144), "layers": 2, "steps": bench.scaled(1500)}
    out["beside"], out["beside_long"] = [], []
    for key, rounds, single in (("beside", 5, short), ("beside_long", 3, long)):
        with bench.daemon("--shm_threads=4") as running:
            for _ in range(rounds):
                alone = bench.load(running, {"shm_threads": 4}, clients=1, **single, **SHM)
                with uploads(bench, running) as (process, gbps):
                    with_uploads = bench.load(running, {"shm_threads": 4}, clients=1, **single,
                                              **SHM)
                    was_beside = process.poll() is None
                out[key].append({"alone": alone, "beside": with_uploads, "uploads_gbps": gbps,
                                 "uploads_outlasted_it": was_beside})


def crowd(programs, args, out, log):
    bench = Bench(programs, args, log)
    seq_len = bench.scaled(32768)
    out["crowd"], out["crowd_of_one"] = [], []
    with bench.daemon("--poller_threads=8", "--shm_threads=8") as running:
        for transport, spread in (("shared_memory", (16,)), ("grpc", (16, 64))):
            for processes in spread:
                out["crowd"].append(bench.load(
                    running, clients=64, processes=processes, seq_len=seq_len,
                    steps=bench.scaled(60), transport=transport))
            out["crowd_of_one"].append(bench.load(running, clients=1, seq_len=seq_len,
                                                  steps=bench.scaled(60), transport=transport))


def two_gpus(programs, args, out, log):
    """48 calls at a time of 16 sequences of 12,288 tokens, half of them on either device, all with
    pages of their own (of two layers, so that so many have room). That is as many as keep each of
    two devices at work while half of its rows gather: 384, where 24 calls gave it 192 and launches
    of 65. A launch of 137 reads 3.5 GB, so that kernels are the bound, not the bus. One device
    before and after two, with the same load, since what it gives may drift."""
    bench = Bench(programs, args, log)
    out["two_gpus"] = []
    for devices in ("0", "0,1", "0"):
        with bench.daemon("--shm_threads=8", devices=devices, seqs=304, layers=2,
                          staging=1 << 30) as running:
            out["two_gpus"].append(bench.load(
                running, {"devices": devices}, clients=8, processes=8, batch=16, in_flight=6,
                seq_len=bench.scaled(12288), steps=bench.scaled(200), in_place=1, **SHM))


PARTS = {part.__name__: part
         for part in (steps, captures, rpc, one, busy, append, beside, crowd, two_gpus)}


def launch_us_per_call(steps):
    """How long the launches of part busy keep the device, by call: two calls of 128 items go as
    one launch. fp8kv_step_bench has it in this run, one launch behind the other and nothing else
    to do: 2,048 tokens a sequence, as the calls of part busy have in the middle."""
    return next(cell["us"] for cell in steps["stream"]
                if cell["items"] == 256 and cell["kv_len"] == 2048
                and cell["precision"] == "fp8_kv" and cell["way"] == "default") / 2


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
        uploads = out["rpc"].get("uploads") or [out["rpc"]["upload_1mib_chunks"]]
        out["append_over_upload_grpc"] = statistics.median(upload["ratio"] for upload in uploads)
    shm = [run["us_p50"] for run in out.get("one", []) if run["transport"] == "shared_memory"]
    if shm:
        out["shm_us_p50"] = statistics.median(shm)
    for transport, suffix in (("shared_memory", ""), ("grpc", "_grpc")):
        runs = [run for run in out.get("crowd", []) if run["transport"] == transport]
        if runs:
            best = max(runs, key=lambda run: run["calls_per_s"])
            out["mean_batch_64_clients" + suffix] = best["batch_items_mean"]
            out["rows_per_launch_64_clients" + suffix] = best["rows_per_launch"]
    if out.get("busy") and "steps" in out:
        out["launch_us_per_call_128"] = launch_us_per_call(out["steps"])
        out["kernel_busy_ratio_shm"] = max(
            run["calls_per_s"] for run in out["busy"]) * out["launch_us_per_call_128"] / 1e6
    if out.get("append") and "steps" in out:
        out["append_over_h2d_shm"] = max(
            run["append_gbps"] for run in out["append"]) / out["steps"]["bus_gbps"]["in"]
    if len(out.get("two_gpus", [])) == 3:
        before, two, after = (run["calls_per_s"] for run in out["two_gpus"])
        out["two_gpu_speedup"] = 2 * two / (before + after)
    for key, suffix in (("beside", ""), ("beside_long", "_long")):
        runs = [run for run in out.get(key, []) if run["uploads_outlasted_it"]]
        if runs:
            out["decode_p99_beside_append_shm" + suffix] = statistics.median(
                run["beside"]["us_p99"] / run["alone"]["us_p99"] for run in runs)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bin", default=str(ROOT / "build/release/bin"))
    parser.add_argument("--prefix", default="")
    parser.add_argument("--out", required=True)
    parser.add_argument("--commit", default="")
    parser.add_argument("--rehearse", action="store_true", help="without a GPU: see above")
    parser.add_argument("--steps", default="", help="JSON of fp8kv_step_bench, of this run")
    parser.add_argument("--parts", default="", help="those alone: see above")
    parser.add_argument("--two_gpus", action="store_true", help="--parts=two_gpus")
    args = parser.parse_args()
    names = "two_gpus" if args.two_gpus else args.parts
    chosen = [PARTS[name] for name in names.split(",")] if names else list(PARTS.values())[:-1]
    path = pathlib.Path(args.out)
    now = {"commit": args.commit, "congestion_control": CONGESTION.read_text().strip(),
           "boot": BOOT.read_text().strip(),
           "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
    out = json.loads(path.read_text()) if names and path.exists() else dict(now)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    failed = []
    with open(args.out + ".log", "w") as log:
        for part in chosen:
            started = time.monotonic()
            try:
                part(Programs(args.bin, args.prefix), args, out, log)
                if names:
                    out.setdefault("parts", {})[part.__name__] = now
            except Exception as error:  # the other parts are worth having
                failed.append(f"{part.__name__}: {error}")
                print(failed[-1], flush=True)
            finally:
                summarize(out)
                path.write_text(json.dumps(out, indent=1) + "\n")
            print(f"{part.__name__}: {time.monotonic() - started:.0f} s", flush=True)
    for key, value in out.items():
        if isinstance(value, float):
            print(f"{key}: {value}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
