#!/usr/bin/env python3
"""What the daemon's host side does under load, measured without a GPU: fp8kvd_timed stands for it.

    bench/host_load.py run --daemon=now=build/release/bin/fp8kvd_timed [--daemon=before=FILE ...]
                           --bin=build/release/bin --rounds=5 --out=docs/measurements/host_DATE.json
    bench/host_load.py table docs/measurements/host_DATE.json docs/performance.md

run takes the daemons in turns, in every round each of them, and keeps medians over the rounds:
  crowd      64 gRPC clients of one thread (crowd_bench), on devices of 6 us a launch call and, for
             each launch, 20 us and so many us a row
  null       one item and batches over gRPC and shared memory (daemon_bench), prompts of two
             processes, on a device that takes no time
  beside     one item at a time over shared memory, alone and beside such prompts, on a device that
             takes in 50 GB/s
table writes what the file says between two marks of the document. Standard library only.
"""

import argparse
import contextlib
import json
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import tempfile
import time

ITEM_US = (20, 60, 200)
NULL = "0,0,0,1e9,1e9"
CONFIG = """
server { listen_address: "127.0.0.1:0" http_address: "" }
engine { staging_bytes: 1073741824 }
cache { seqs_max: 1024 seq_len_max: 524288 }
policy { allow_fp8_kv: true }
models {
  name: "bench" layers: 8 q_heads: 64 kv_heads: 8 head_dim: 128
  expected_seqs: 72 expected_tokens: 33024 precision: fp8_kv
}
"""
SHM = "--transport=shared_memory"
BEGIN, END = "<!-- from bench/host_load.py -->\n", "<!-- end of host_load -->\n"


class Daemon:
    def __init__(self, program, device, folder):
        (folder / "config.textproto").write_text(CONFIG)
        self._port = folder / "port"
        self._port.unlink(missing_ok=True)
        self._log = open(folder / "log", "w+")
        self.process = subprocess.Popen(
            [program, f"--config={folder / 'config.textproto'}", f"--port_file={self._port}"],
            stdout=self._log, stderr=subprocess.STDOUT, env={**os.environ, "TIMED_DEVICE": device})
        until = time.monotonic() + 30
        while not self._port.exists() and time.monotonic() < until:
            time.sleep(0.02)
        self.target = "127.0.0.1:" + self._port.read_text().strip()

    def stop(self):
        """What the device says at its end: launches and rows of decodes."""
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(timeout=60)
        self._log.seek(0)
        text = self._log.read()
        self._log.close()
        said = [line for line in text.splitlines() if line.startswith("timed device:")]
        words = said[-1].replace(",", "").split() if said else []
        return {"busy": float(words[5]), "rows_per_launch":
                float(words[-2]) / float(words[-4])} if "launches" in words else {}


@contextlib.contextmanager
def daemon(program, device):
    with tempfile.TemporaryDirectory() as folder:
        running = Daemon(program, device, pathlib.Path(folder))
        try:
            yield running
        finally:
            if running.process.poll() is None:
                running.stop()


def bench(bin_folder, name, target, *flags):
    done = subprocess.run([str(pathlib.Path(bin_folder) / name), target, *flags], check=True,
                          capture_output=True, text=True, timeout=300)
    return json.loads(done.stdout)


def crowd(program, bin_folder, item_us):
    steps = max(10, 4000 // (item_us + 40))
    with daemon(program, f"6,20,{item_us},4200,50") as running:
        got = bench(bin_folder, "crowd_bench", running.target, f"--steps={steps}")
        said = running.stop()
    return {**got, **said}


def null(program, bin_folder):
    out = {}
    with daemon(program, NULL) as running:
        for name, flags in (("one", ("--steps=250",)), ("eight", ("--batch=8", "--steps=100")),
                            ("batches", ("--batch=128", "--in_flight=3", "--prompts=4",
                                         "--seq_len=2048", "--steps=15"))):
            for transport in ("--transport=grpc", SHM):
                got = bench(bin_folder, "daemon_bench", running.target, *flags, transport)
                out[f"{name}_{transport[12:]}"] = got
        for transport in ("--transport=grpc", SHM):
            out[f"prompts_{transport[12:]}"] = bench(
                bin_folder, "daemon_bench", running.target, "--clients=2", "--processes=2",
                "--steps=1", "--append_tokens=16384", transport)
    return out


def beside(program, bin_folder):
    one = ("--steps=250", SHM)
    with daemon(program, "6,12,0.6,4200,50") as running:
        alone = bench(bin_folder, "daemon_bench", running.target, *one)
        uploads = subprocess.Popen(
            [str(pathlib.Path(bin_folder) / "daemon_bench"), running.target,
             "--append_tokens=400000", "--steps=1", SHM],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(1)  # until prompts come in
        with_uploads = bench(bin_folder, "daemon_bench", running.target, *one)
        was_beside = uploads.poll() is None
        uploads.kill()
        uploads.wait()
    return {"alone": alone, "beside": with_uploads, "uploads_outlasted_it": was_beside}


def medians(runs):
    """Of runs of one shape: the median of every number, the rest as in the first."""
    first = runs[0]
    if isinstance(first, dict):
        return {key: medians([run[key] for run in runs]) for key in first}
    if isinstance(first, float | int) and not isinstance(first, bool):
        return round(statistics.median(runs), 3)
    return first if not isinstance(first, bool) else all(runs)


def run(args):
    programs = dict(text.split("=", 1) for text in args.daemon)
    found = {name: [] for name in programs}
    for _ in range(args.rounds):
        rounds = {name: {"crowd": {}} for name in programs}
        for item_us in ITEM_US:
            for name, program in programs.items():
                rounds[name]["crowd"][str(item_us)] = crowd(program, args.bin, item_us)
        for name, program in programs.items():
            rounds[name]["null"] = null(program, args.bin)
            rounds[name]["beside"] = beside(program, args.bin)
        for name, of_round in rounds.items():
            found[name].append(of_round)
    out = {"what": "bench/host_load.py: no GPU, fp8kvd_timed; medians of interleaved rounds",
           "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "note": args.note,
           "cores": os.cpu_count(), "rounds": args.rounds,
           "daemons": {name: medians(rounds) for name, rounds in found.items()}}
    pathlib.Path(args.out).write_text(json.dumps(out, indent=1) + "\n")


def table(args):
    found = json.loads(pathlib.Path(args.json).read_text())
    lines = ["", f"{found['cores']} cores, no GPU, a device that takes time ({found['date']}, "
             f"medians of {found['rounds']} rounds in turns). {found['note']}", "",
             "| us a row | daemon | calls/s | rows a launch, by call | by launch | device busy | "
             "p50 us |", "|---|---|---|---|---|---|---|"]
    for item_us in ITEM_US:
        for name, of_daemon in found["daemons"].items():
            row = of_daemon["crowd"][str(item_us)]
            lines.append(f"| {item_us} | {name} | {row['calls_per_s']:.0f} | "
                         f"{row['batch_items_mean']:.1f} | {row['rows_per_launch']:.1f} | "
                         f"{row['busy']:.2f} | {row['us_p50']:.0f} |")
    now = list(found["daemons"].values())[0]
    lines += ["", "| on a device that takes no time | gRPC | shared memory |", "|---|---|---|"]
    for name, what, key in (("one", "1 item, p50 us", "us_p50"),
                            ("eight", "8 items, p50 us", "us_p50"),
                            ("batches", "128 items, 3 in flight, calls/s", "calls_per_s"),
                            ("prompts", "prompts of two processes, GB/s", "append_gbps")):
        pair = [now["null"][f"{name}_{way}"][key] for way in ("grpc", "shared_memory")]
        lines.append(f"| {what} | {pair[0]:.1f} | {pair[1]:.1f} |")
    pair = [now["beside"][way] for way in ("alone", "beside")]
    if not now["beside"]["uploads_outlasted_it"]:
        raise SystemExit("the prompts ended before the decodes beside them: send more")
    lines += ["", f"A decode over shared memory: p50 {pair[0]['us_p50']:.0f} and p99 "
              f"{pair[0]['us_p99']:.0f} us alone, {pair[1]['us_p50']:.0f} and "
              f"{pair[1]['us_p99']:.0f} beside prompts, which take all of {found['cores']} cores.",
              "", ""]
    document = pathlib.Path(args.document)
    head, rest = document.read_text().split(BEGIN)
    document.write_text(head + BEGIN + "\n".join(lines) + END + rest.split(END)[1])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True)
    runner = commands.add_parser("run")
    runner.add_argument("--daemon", action="append", required=True, help="NAME=FILE, first is now")
    runner.add_argument("--bin", required=True)
    runner.add_argument("--rounds", type=int, default=5)
    runner.add_argument("--note", default="")
    runner.add_argument("--out", required=True)
    runner.set_defaults(command=run)
    writer = commands.add_parser("table")
    writer.add_argument("json")
    writer.add_argument("document")
    writer.set_defaults(command=table)
    args = parser.parse_args()
    args.command(args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
