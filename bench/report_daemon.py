#!/usr/bin/env python3
"""Writes the daemon's tables in docs/performance.md from docs/measurements/daemon_h200.json.

    bench/report_daemon.py           after a new measurement (bench/daemon_gpu.py)
    bench/report_daemon.py --check   fails if the page is not what the JSON says
"""

import json
import pathlib
import statistics
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
JSON = ROOT / "docs/measurements/daemon_h200.json"
DOC = ROOT / "docs/performance.md"
BEGIN, END = "<!-- from bench/report_daemon.py -->", "<!-- end of report_daemon -->"


def table(head, rows):
    return [f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rows]]


def crowd_row(data, transport, name, wanted):
    runs = [run for run in data["crowd"] if run["transport"] == transport]
    best = max(runs, key=lambda run: run["calls_per_s"])
    alone = [f"{run['us_p50']:.0f} us" for run in data["crowd_of_one"]
             if run["transport"] == transport]
    return [f"64 clients x 32,768 tokens, {name}: mean batch by call, by launch; calls/s, p50; one "
            "client alone, p50",
            f"{best['batch_items_mean']:.1f}, {best['rows_per_launch']:.1f}; "
            f"{best['calls_per_s']:,.0f}, {best['us_p50'] / 1e3:.2f} ms; "
            f"{alone[0] if alone else 'not measured'}", wanted]


def steps_run(data):
    """Whether the launches that "busy" is held against were timed in the same run, or when."""
    parts = data.get("parts", {})
    steps, busy = (parts.get(name, data) for name in ("steps", "busy"))
    same = ("boot", "commit")
    if "boot" in steps and all(steps[key] == busy.get(key) for key in same):
        return "in this run"
    return f"at {steps['commit'][:7]}, {steps['date']}"


def uploads(data):
    ratios = [upload["ratio"] for upload in data["rpc"].get("uploads", [])]
    median = f"{data['append_over_upload_grpc']:.2f}"
    return f"{median} ({min(ratios):.2f} to {max(ratios):.2f})" if ratios else median


def beside_row(runs, ratio, wanted):
    """runs: of daemons that were measured before prompts were, too, without their rates. Each call
    of a layer is of a token more than the last one."""
    runs = [run for run in runs if run["uploads_outlasted_it"]]
    load = runs[0]["beside"]
    tokens = f"{load['seq_len'] + 1:,} to {load['seq_len'] + load['calls'] // load['layers']:,}"
    gbps = "not measured"
    if all("uploads_gbps" in run for run in runs):
        alone = statistics.median(run["uploads_gbps"] for run in runs)
        beside = statistics.median(run["beside"]["kv_taken_gbps"] for run in runs)
        gbps = f"{alone:.1f}, {beside:.1f}"
    return [f"decode, 1 item of {tokens} tokens, beside prompts of two processes: p99 of idle's; "
            "prompts before it and beside it, GB/s", f"{ratio:.2f}; {gbps}", wanted]


def named(data):
    one = [run for run in data["one"] if run["transport"] == "shared_memory"]
    means = {part: statistics.median(run[f"{part}_us_mean"] for run in one)
             for part in ("stage", "queue", "kernel", "reply")}
    busy = max(data["busy"], key=lambda run: run["calls_per_s"])
    append = max(data["append"], key=lambda run: run["append_gbps"])
    rows = [
        ["decode call, 1 item, kv 1024: shared memory, p50; of it, means: staged, queued, on the "
         "device, replied", f"{data['shm_us_p50']:.1f} us; "
         + ", ".join(f"{us:.1f}" for us in means.values()), "25 us"],
        ["the same over a gRPC stream from a bare client, beside a raw echo of its bytes",
         f"{data['grpc_bidi_us_p50']:.1f} us, {data['grpc_echo_us_p50']:.1f} us", "30 us apart"],
        ["128 items a message, 4 in flight, one gRPC stream: bytes/s of the echo",
         f"{data['grpc_bytes_over_echo']:.2f}", "0.80"],
        ["upload over gRPC: of the echo", uploads(data), "0.80"],
        ["128 items a call, kv 2048, shared memory: calls/s, rows/s; kernels busy, at "
         f"{data['launch_us_per_call_128']:.1f} us a call (`fp8kv_step_bench` {steps_run(data)})",
         f"{busy['calls_per_s']:,.0f}, {128 * busy['calls_per_s']:,.0f}; "
         f"{data['kernel_busy_ratio_shm']:.2f}", "0.85"],
        ["append over shared memory: GB/s; of host to device",
         f"{append['append_gbps']:.1f}; {data['append_over_h2d_shm']:.2f}", "0.70"],
        crowd_row(data, "shared_memory", "shared memory", "24"),
        crowd_row(data, "grpc", "gRPC", ""),
    ]
    for key, suffix, wanted in (("beside", "", "2"), ("beside_long", "_long", "")):
        ratio = data.get("decode_p99_beside_append_shm" + suffix)
        if ratio is not None:
            rows.append(beside_row(data[key], ratio, wanted))
    speedup = data.get("two_gpu_speedup")
    rows.append(["two GPUs: calls/s of one's",
                 "not measured" if speedup is None else f"{speedup:.2f}", "1.9"])
    return table(["what", "measured", "wanted"], rows)


def kv_read(run):
    return f"{run['kv_read_gbps'] / 1e3:.2f}" if "kv_read_gbps" in run else "not measured"


def by_load(data):
    rows = []
    for run in data["busy"]:
        rows.append([f"{run['processes']} x {run['in_flight']}", f"{run['shm_threads']}",
                     f"{run['launches_inflight_max']}", "in place" if run["in_place"] else "copied",
                     f"{run['calls_per_s']:,.0f}", kv_read(run), f"{run['rows_per_launch']:.0f}",
                     *(f"{run[part + '_us_mean']:.0f}"
                       for part in ("stage", "queue", "kernel", "reply"))])
    return table(["processes x groups", "shm_threads", "launches", "rows", "calls/s",
                  "K and V TB/s", "rows a launch", "staged us", "queued", "on the device",
                  "replied"], rows)


def prompts(data):
    return table(["processes", "shm_threads", "rows", "GB/s"],
                 [[f"{run['processes']}", f"{run['shm_threads']}",
                   "in place" if run["in_place"] else "copied", f"{run['append_gbps']:.1f}"]
                  for run in data["append"]])


def report(data):
    parts = {when["commit"] for when in data.get("parts", {}).values()}
    commits = ", ".join(sorted(parts | ({data["commit"]} if "commit" in data else set())))
    return "\n".join([BEGIN, "", f"{data['device']}, commit {commits}.", "", *named(data), "",
                      "Batches of 128 by load:", "", *by_load(data), "", "Prompts by load:", "",
                      *prompts(data), "", END])


def main():
    data = json.loads(JSON.read_text())
    doc = DOC.read_text()
    head, rest = doc.split(BEGIN, 1)
    new_doc = head + report(data) + rest.split(END, 1)[1]
    if "--check" in sys.argv[1:]:
        sys.exit(0 if doc == new_doc else "docs/performance.md is not what the JSON says")
    DOC.write_text(new_doc)


if __name__ == "__main__":
    main()
