"""Results of tests, read from ctest's JUnit file, and the closing report."""

import dataclasses
import re
import xml.etree.ElementTree

SLOWEST_SHOWN = 12
SKIPPED_SHOWN_PER_TEST = 8


@dataclasses.dataclass
class Result:
    name: str  # group/test
    passed: bool
    seconds: float
    budget_s: float
    why: str = ""  # of a failure
    skipped: tuple = ()  # cases inside it that did not run here
    skipped_whole: bool = False  # it says itself that it cannot run here; neither passed nor failed


def results_from_junit(path, tests):
    """One Result per test; a test that the file does not mention did not run, and failed."""
    try:
        cases = {case.get("name"): case
                 for case in xml.etree.ElementTree.parse(path).getroot().iter("testcase")}
    except (OSError, xml.etree.ElementTree.ParseError) as error:
        cases = {}
        print(f"ctest left no readable results: {error}")
    return [_result(test, cases.get(test.name)) for test in tests]


def _result(test, case):
    if case is None:
        return Result(test.full_name, False, 0, test.budget_s, "did not run")
    seconds = float(case.get("time", 0))
    output = case.findtext("system-out", "")
    why = ""
    if case.find("skipped") is not None and "SKIP" in case.find("skipped").get("message", ""):
        said = output.strip().split("\n")[-1]
        return Result(test.full_name, True, seconds, test.budget_s, said, skipped_whole=True)
    if case.get("status") != "run":
        failure = case.find("failure")
        message = failure.get("message", "") if failure is not None else case.get("status")
        why = message or "failed"
        if test.budget_s and seconds >= test.budget_s:
            why = f"over its budget of {test.budget_s:.0f} s (tests/budget.txt)"
    elif re.search(r"^\[==========\] Running 0 tests", output, re.MULTILINE):
        why = "holds no test"
    skipped = tuple(dict.fromkeys(re.findall(r"^\[  SKIPPED \] (\S+) \(\d+ ms\)", output,
                                             re.MULTILINE)))
    return Result(test.full_name, not why, seconds, test.budget_s, why, skipped)


def print_report(results, total_seconds):
    """What was slow, skipped and failed; the count is the last line. Returns the exit code."""
    if results:
        print(f"\nslowest of {len(results)} tests, all in {total_seconds:.0f} s:")
        for result in sorted(results, key=lambda r: -r.seconds)[:SLOWEST_SHOWN]:
            print(f"  {result.seconds:8.2f} s of {result.budget_s:5.0f}  {result.name}")
    for result in (r for r in results if r.skipped):
        shown = ", ".join(result.skipped[:SKIPPED_SHOWN_PER_TEST])
        more = len(result.skipped) - SKIPPED_SHOWN_PER_TEST
        print(f"skipped inside {result.name}: {shown}" + (f" and {more} more" if more > 0 else ""))
    for result in (r for r in results if r.skipped_whole):
        print(f"SKIPPED {result.name}: {result.why}")
    counted = [result for result in results if not result.skipped_whole]
    failed = [result for result in counted if not result.passed]
    for result in failed:
        print(f"FAILED {result.name}: {result.why}")
    if not counted:
        print("no test ran")
    print(f"{len(counted) - len(failed)} passed, {len(failed)} failed", flush=True)
    return 1 if failed or not counted else 0
