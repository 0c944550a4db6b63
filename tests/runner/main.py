"""Builds and runs the tests; tests/run starts it after the packages are there."""

import argparse
import contextlib
import re
import signal
import sys
import time

import builds
import report
import toolchain

HELP = """\
A NAME is a group or a test:
  release asan tsan   all tests of that build (asan: address and undefined behaviour, by clang)
  style               layout, layers, sizes, clang-format, clang-tidy
  fuzz                the fuzz targets, each for a bounded time
  cuda                the CUDA code; with a GPU also its kernels
  hf                  Hugging Face models; fetches torch, transformers and two models: gigabytes
  kernels_cpu_test    one test, in every build that has it; asan/kernels_cpu_test: in one build
  'cache_.*'          tests whose whole name matches
"""
HF_ENVIRONMENT_SECONDS_MAX = 1200
# In which build the tests of a group stand, where the group is not itself a build.
BUILD_OF_GROUP = {"style": "release", "cuda": "release", "hf": "release", "fuzz": "asan"}


def parse(arguments):
    parser = argparse.ArgumentParser(prog="tests/run", epilog=HELP,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: everything")
    parser.add_argument("--list", action="store_true", help="print the tests instead of running")
    parser.add_argument("--budget_scale", type=int, default=1, metavar="N",
                        help="N times the budgets, on a machine that does other things meanwhile")
    return parser.parse_args(arguments)


def matches(name, test):
    return name == test.group or any(re.fullmatch(name, text) for text in
                                     (test.name, test.full_name))


def builds_for(names, budget_scale):
    """The builds that can hold a test called so, configured later."""
    presets = ["release", "asan", "tsan"]
    groups = {name.split("/")[0] for name in names}
    if names and groups <= {*presets, *BUILD_OF_GROUP}:
        wanted = {BUILD_OF_GROUP.get(group, group) for group in groups}
        presets = [preset for preset in presets if preset in wanted]
    arguments = {"release": lambda: ["-DFP8KVD_CUDA=ON",
                                     f"-DFP8KVD_NVCC={toolchain.ensure_nvcc()}"]}
    scale = f"-DFP8KVD_BUDGET_SCALE={budget_scale}"
    return [builds.Build(preset, [scale, *arguments.get(preset, list)()]) for preset in presets]


def run_build(build, names):
    """Builds and runs the tests of one build that bear one of the names (none: all)."""
    tests = [test for test in build.tests
             if not names or any(matches(name, test) for name in names)]
    results = []
    with contextlib.ExitStack() as ends:
        beside = None
        if any(test.group == "hf" for test in tests):
            beside = ends.enter_context(builds.Beside(
                "hf: environment", [sys.executable, "tests/runner/hf_environment.py"]))
        if tests and not build.build(tests, everything=not names and build.preset == "release"):
            results.append(report.Result(f"{build.preset}/build", False, 0, 0,
                                         "does not build; the compiler's message stands above"))
        if beside and not beside.wait(HF_ENVIRONMENT_SECONDS_MAX):
            results.append(report.Result("hf/environment", False, 0, 0,
                                         "cannot be made; its message stands above"))
    return results + (build.run(tests) if tests else [])


def main():
    options = parse(sys.argv[1:])
    # Told to stop, it unwinds, so that what it started ends too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    start = time.monotonic()
    try:
        toolchain.ensure_venv()
        chosen = builds_for(options.names, options.budget_scale)
    except toolchain.ToolchainError as error:
        print(f"tests/run: {error}")
        return report.print_report([report.Result("toolchain", False, 0, 0, str(error))], 0)
    results = [report.Result(f"{build.preset}/configure", False, 0, 0, "CMake's message above")
               for build in chosen if not build.configure()]
    tests = [test for build in chosen for test in build.tests]
    if options.list:
        print("\n".join(sorted(test.full_name for test in tests)))
        return 0
    if not results:  # else a name may be missing because its build is
        results += [report.Result(name, False, 0, 0, "no such test; see tests/run --list")
                    for name in options.names if not any(matches(name, test) for test in tests)]
    for build in chosen:
        results += run_build(build, options.names)
    return report.print_report(results, time.monotonic() - start)


if __name__ == "__main__":
    sys.exit(main())
