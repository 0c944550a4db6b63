"""What a decode call costs through the Python client beyond the C++ client, and through bare
grpcio; all against one daemon that this starts, in turns, so that all meet the same machine.

    python3 bench/py_overhead.py [--rounds=N] [--calls=N] [--json=FILE]

One sequence of 64 tokens, attend only, one call at a time. Needs fp8kvd and client_bench built in
FP8KVD_BIN_DIR (default build/release/bin) and the packages of tests/requirements.txt.
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import time

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "tests/py"))
from package import BIN  # noqa: E402  # installs fp8kvd

import grpc  # noqa: E402
import ml_dtypes  # noqa: E402
import numpy as np  # noqa: E402

import fp8kvd  # noqa: E402
from daemon_process import DaemonProcess  # noqa: E402
from fp8kvd.v1 import kv_pb2 as kv  # noqa: E402

TOKENS = 64
CONFIG = """
models { name: "llama" layers: 1 q_heads: 32 kv_heads: 8 head_dim: 128
         expected_seqs: 4 expected_tokens: 64 precision: bf16 }
"""


def microseconds(call, calls):
    times = []
    for _ in range(calls):
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e6)
    return times


def own_microseconds(client, call, calls):
    """What calls spend outside of grpcio, of each: steadier than the difference of two p50s."""
    stubs, inside = client._core._stubs.unary, []
    decode = stubs["Decode"]

    def timed(*arguments, **named):
        start = time.perf_counter()
        reply = decode(*arguments, **named)
        inside.append((time.perf_counter() - start) * 1e6)
        return reply
    stubs["Decode"] = timed
    whole = microseconds(call, calls)
    stubs["Decode"] = decode
    return [outer - inner for outer, inner in zip(whole, inside)]


def cxx(address, calls):
    ran = subprocess.run([BIN / "client_bench", address, "llama", str(calls)], check=True,
                         capture_output=True, text=True, timeout=300)
    return [float(line) for line in ran.stdout.split()]


def measure(address, rounds, calls):
    """Rows of p50s, one a round: C++, fp8kvd, grpcio alone, fp8kvd without its grpcio."""
    ones = np.ones((TOKENS, 8, 128), ml_dtypes.bfloat16)
    q = np.ones((1, 32, 128), ml_dtypes.bfloat16)
    channel = grpc.insecure_channel(address)
    bare = channel.unary_unary("/fp8kvd.v1.DecodeAttention/Decode")
    with fp8kvd.Client(address, options=fp8kvd.Options(address, transport="grpc")) as client, \
            client.create_sequence("llama", expected_tokens=TOKENS) as seq:
        seq.append(ones, ones, layer=0)
        request = kv.DecodeRequest(
            model="llama", handles=[kv.Handle(**seq.handle._asdict())], positions=[TOKENS - 1],
            q=q.tobytes(), out_type=kv.OUT_TYPE_BF16).SerializeToString()
        for _ in range(rounds):
            samples = (cxx(address, calls), microseconds(lambda: seq.decode(q, layer=0), calls),
                       microseconds(lambda: bare(request), calls),
                       own_microseconds(client, lambda: seq.decode(q, layer=0), calls))
            yield [statistics.median(sample[calls // 10:]) for sample in samples]
    channel.close()


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="also writes it there")
    parser.add_argument("--note", default="", help="what a reader should know of the machine")
    options = parser.parse_args()
    daemon = DaemonProcess(CONFIG)
    try:
        rows = list(measure(daemon.address, options.rounds, options.calls))
    finally:
        daemon.stop()
    print("p50 of each round, microseconds a call:\n     C++  fp8kvd  grpcio alone  own code")
    for row in rows:
        print("{:8.1f}{:8.1f}{:14.1f}{:10.1f}".format(*row))
    over_cxx, over_grpcio = (statistics.median(row[1] - row[other] for row in rows)
                             for other in (0, 2))
    print(f"fp8kvd over C++ {over_cxx:.1f} us, over grpcio alone {over_grpcio:.1f} us "
          "(medians of the rounds' differences); "
          f"own code {statistics.median(row[3] for row in rows):.1f} us")
    if options.json:
        columns = zip(("cxx", "fp8kvd", "grpcio", "own_code"), zip(*rows))
        options.json.write_text(json.dumps({
            "what": "p50 of a decode call, one item of 64 tokens, 32/8 heads, d128, microseconds",
            "note": options.note, "python": sys.version.split()[0], "calls": options.calls,
            "rounds": {name: [round(p50, 1) for p50 in column] for name, column in columns},
            "over_cxx_us": round(over_cxx, 1), "over_grpcio_us": round(over_grpcio, 1)},
            indent=1) + "\n")


if __name__ == "__main__":
    main()
