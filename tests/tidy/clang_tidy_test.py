"""Tests of clang_tidy.py: sources that are read joined are judged as each of them would be."""

import contextlib
import io
import json
import pathlib
import tempfile
import unittest
from unittest import mock

import clang_tidy

CHECKS = "Checks: '-*,bugprone-infinite-loop,clang-analyzer-core.DivideZero," \
    "misc-unused-parameters,readability-duplicate-include'\nWarningsAsErrors: '*'\n"
# What bears a name in a namespace without one, each time another thing.
CLASHES = "namespace {{\n{kind} Here() {{ return 1; }}\n}}  // namespace\n"


class ClangTidy(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = pathlib.Path(folder.name).resolve()
        self.build = self.root / "build"
        self.build.mkdir()
        self.write(".clang-tidy", CHECKS)

    def write(self, name, text):
        path = self.root / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)

    def run_it(self, *folders):
        """Exit status and output over all sources, each compiled with -I of the root."""
        commands = [{"file": str(path), "directory": str(self.build),
                     "command": f"/usr/bin/c++ -I{self.root} -std=c++20 -o {path.name}.o -c {path}"}
                    for path in sorted(self.root.rglob("*.cc"))]
        (self.build / "compile_commands.json").write_text(json.dumps(commands))
        output = io.StringIO()
        with contextlib.redirect_stdout(output), \
             mock.patch.object(clang_tidy, "REPOSITORY", self.root), \
             mock.patch("sys.argv", ["clang_tidy.py", str(self.build), *(folders or ["a"])]):
            clang_tidy.included.cache_clear()
            status = clang_tidy.main()
        return status, output.getvalue()

    def test_sources_that_go_together_are_read_once(self):
        self.write("a/h.h", "#pragma once\n")
        for name in ("one", "two", "three"):
            self.write(f"a/{name}.cc", f'#include "a/h.h"\n#include <cstdint>\nint {name}() '
                                       "{ return 1; }\n")
        status, output = self.run_it()
        self.assertEqual(status, 0, output)
        self.assertIn("a/one.cc and 2 more: clean", output)

    def test_a_finding_is_placed_in_its_source(self):
        self.write("a/one.cc", "int One() {\n  return 1;\n}\n")
        self.write("a/two.cc", "\n\nint Two(int unused) { return 2; }\n")
        status, output = self.run_it()
        self.assertEqual(status, 1)
        self.assertIn(f"{self.root}/a/two.cc:3:13: error: parameter 'unused'", output)

    def test_the_analyzer_sees_every_source(self):
        self.write("a/one.cc", "int One(int x) { return x; }\n")
        self.write("a/two.cc", "int Two() {\n  int zero = 0;\n  return 1 / zero;\n}\n")
        status, output = self.run_it()
        self.assertEqual(status, 1)
        self.assertIn(f"{self.root}/a/two.cc:3:12: error: Division by zero", output)

    def test_an_include_that_another_source_has_is_no_finding_but_a_double_one_is(self):
        self.write("a/one.cc", "#include <cstdint>\n")
        self.write("a/two.cc", "#include <cstdint>\n")
        self.assertEqual(self.run_it()[0], 0)
        self.write("a/two.cc", "#include <cstdio>\n#include <cstdio>\n")
        status, output = self.run_it()
        self.assertEqual(status, 1)
        self.assertIn("a/two.cc:2:1: error: duplicate include", output)

    def test_sources_that_clash_are_read_apart_and_all_of_them(self):
        for name, kind in (("one", "int"), ("two", "long"), ("three", "char"), ("four", "short")):
            self.write(f"a/{name}.cc", CLASHES.format(kind=kind) + f"int {name}() {{\n"
                       f"  return Here();\n}}\nint Late{name}(int unused) {{ return 1; }}\n")
        status, output = self.run_it()
        self.assertEqual(status, 1)
        for name in ("one", "two", "three", "four"):
            self.assertIn(f"a/{name}.cc:7:", output)
        self.assertNotIn("redefinition", output)

    def test_one_that_does_not_compile_is_a_finding(self):
        self.write("a/one.cc", "int One() { return 1; }\n")
        self.write("a/two.cc", "int Two() { return nothing; }\n")
        status, output = self.run_it()
        self.assertEqual(status, 1)
        self.assertIn("a/one.cc: clean", output)
        self.assertIn("a/two.cc:1:20: error: use of undeclared identifier 'nothing'", output)

    def test_what_was_clean_is_read_again_when_it_changes(self):
        self.write("a/h.h", "#pragma once\n")
        self.write("a/one.cc", '#include "a/h.h"\n')
        self.write("a/two.cc", "int Two() { return 2; }\n")
        self.run_it()
        self.assertEqual(self.run_it(), (0, "2 sources, 0 in texts with findings\n"))
        self.write("a/h.h", "#pragma once\n#include <cstdint>\n")
        status, output = self.run_it()
        self.assertEqual(status, 0)
        self.assertIn("a/one.cc: clean", output)
        self.write(".clang-tidy", CHECKS + "# another\n")
        self.assertIn("a/one.cc and 1 more: clean", self.run_it()[1])

    def test_folders_and_all_but_them(self):
        self.write("a/one.cc", "int One() { return 1; }\n")
        self.write("b/two.cc", "int Two() { return 2; }\n")
        self.assertIn("1 sources", self.run_it("a")[1])
        self.assertIn("b/two.cc: clean", self.run_it("--except", "a")[1])


if __name__ == "__main__":
    unittest.main()
