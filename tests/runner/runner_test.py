"""Tests of tests/run's own rules: what counts as passed, what a NAME selects, what closes a run."""

import contextlib
import io
import os
import pathlib
import select
import signal
import subprocess
import tempfile
import unittest

import builds
import main
import report

TEST = builds.Test("release", "cache_test", 5.0, ["cache_test"])


def result_of(testcase, tests=(TEST,)):
    """What the runner makes of a JUnit file that holds this."""
    with tempfile.TemporaryDirectory() as folder:
        junit = pathlib.Path(folder) / "junit.xml"
        junit.write_text(f"<testsuite>{testcase}</testsuite>")
        return report.results_from_junit(junit, list(tests))[0]


def case(status="run", seconds=1, inside=""):
    return f'<testcase name="cache_test" time="{seconds}" status="{status}">{inside}</testcase>'


def closing(results):
    """Exit code and lines of a report."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        code = report.print_report(results, 1)
    return code, output.getvalue().splitlines()


class Results(unittest.TestCase):
    def test_one_that_ran_passed(self):
        self.assertTrue(result_of(case()).passed)

    def test_one_that_failed_failed(self):
        self.assertFalse(result_of(case("fail", inside='<failure message="x"/>')).passed)

    def test_one_over_its_budget_says_so(self):
        result = result_of(case("fail", 5.01, '<failure message="Timeout"/>'))
        self.assertFalse(result.passed)
        self.assertIn("over its budget of 5 s", result.why)

    def test_one_that_the_file_does_not_mention_failed(self):
        self.assertFalse(result_of("").passed)

    def test_an_unreadable_file_fails_all(self):
        with contextlib.redirect_stdout(io.StringIO()):
            self.assertFalse(result_of("<").passed)

    def test_a_binary_without_cases_failed(self):
        output = "<system-out>[==========] Running 0 tests from 0 test suites.</system-out>"
        self.assertEqual(result_of(case(inside=output)).why, "holds no test")

    def test_skipped_cases_are_named(self):
        output = "<system-out>[  SKIPPED ] Simd.Avx512 (0 ms)</system-out>"
        self.assertEqual(result_of(case(inside=output)).skipped, ("Simd.Avx512",))


    def test_one_that_says_it_cannot_run_here_is_neither_passed_nor_failed(self):
        result = result_of(case("notrun", inside='<skipped message="SKIP_RETURN_CODE=77"/>'
                                '<system-out>skipped: needs a tool</system-out>'))
        code, lines = closing([result])
        self.assertEqual((code, lines[-1]), (1, "0 passed, 0 failed"))
        self.assertIn("SKIPPED release/cache_test: skipped: needs a tool", lines)

    def test_one_whose_binary_is_missing_failed(self):
        self.assertFalse(result_of(case("notrun", inside='<skipped message="Not Run"/>')).passed)


class Bounds(unittest.TestCase):
    def test_a_command_past_its_limit_ends_with_all_that_it_started(self):
        with tempfile.TemporaryDirectory() as folder:
            fifo = pathlib.Path(folder) / "fifo"
            os.mkfifo(fifo)
            reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
            self.addCleanup(os.close, reader)
            with self.assertRaises(subprocess.TimeoutExpired):
                builds.run_bounded(["sh", "-c", f"sleep 600 > {fifo} & wait"], 1, captured=False)
            ended, _, _ = select.select([reader], [], [], 10)  # its last writer is gone
            self.assertEqual(ended, [reader])

    def test_output_and_status_come_back(self):
        self.assertEqual(builds.run_bounded(["sh", "-c", "echo x; exit 3"], 10, captured=True),
                         (3, b"x\n"))


class Leftovers(unittest.TestCase):
    def test_what_a_killed_test_leaves_behind_goes(self):
        with builds.temporary_folder() as folder:
            status, _ = builds.run_bounded(
                ["sh", "-c", 'mkdir "$TMPDIR/fp8kvd_test_x" && touch "$TMPDIR/fp8kvd_test_x/y" && '
                 "kill -KILL $$"], 10, captured=True, environment={"TMPDIR": folder})
            self.assertEqual((status, os.listdir(folder)), (-signal.SIGKILL, ["fp8kvd_test_x"]))
        self.assertFalse(os.path.exists(folder))

    def test_they_go_when_the_run_is_told_to_stop_too(self):
        with self.assertRaises(SystemExit), builds.temporary_folder() as folder:
            raise SystemExit(1)
        self.assertFalse(os.path.exists(folder))


class Closing(unittest.TestCase):
    PASSED = report.Result("release/a", True, 1, 5)
    FAILED = report.Result("release/b", False, 1, 5, "reason")

    def test_the_count_is_the_last_line(self):
        self.assertEqual(closing([self.PASSED])[1][-1], "1 passed, 0 failed")

    def test_all_passed_exits_0(self):
        self.assertEqual(closing([self.PASSED])[0], 0)

    def test_a_failure_exits_1_and_is_named_with_its_reason(self):
        code, lines = closing([self.PASSED, self.FAILED])
        self.assertEqual(code, 1)
        self.assertIn("FAILED release/b: reason", lines)

    def test_nothing_run_exits_1(self):
        self.assertEqual(closing([])[0], 1)


class Names(unittest.TestCase):
    def test_a_group_a_test_a_test_of_a_build_and_a_pattern_select(self):
        for name in ("release", "cache_test", "release/cache_test", "cache_.*"):
            self.assertTrue(main.matches(name, TEST), name)

    def test_others_do_not(self):
        for name in ("asan", "cache", "asan/cache_test", "_test"):
            self.assertFalse(main.matches(name, TEST), name)


class Beside(unittest.TestCase):
    def test_it_is_waited_for(self):
        with contextlib.redirect_stdout(io.StringIO()):
            for status, succeeds in ((0, True), (3, False)):
                with builds.Beside("x", ["sh", "-c", f"exit {status}"]) as beside:
                    self.assertEqual(beside.wait(20), succeeds)

    def test_it_ends_with_the_block_and_all_that_it_started(self):
        with tempfile.TemporaryDirectory() as folder:
            fifo = pathlib.Path(folder) / "fifo"
            os.mkfifo(fifo)
            reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
            self.addCleanup(os.close, reader)
            with contextlib.redirect_stdout(io.StringIO()), \
                    builds.Beside("x", ["sh", "-c", f"sleep 600 > {fifo} & wait"]) as beside:
                self.assertFalse(beside.wait(1))
            ended, _, _ = select.select([reader], [], [], 10)  # its last writer is gone
            self.assertEqual(ended, [reader])


if __name__ == "__main__":
    unittest.main()
