"""Tests of tidy.py: each rule finds exactly what its fixture's expected.txt names."""

import pathlib
import tempfile
import unittest

import rules
import tidy
from tree import Tree

FIXTURES = pathlib.Path(__file__).resolve().parent / "fixtures"
MADE_HERE = {"blob_size", "file_lines", "function_lines"}  # too large to keep as files


def found(rule, folder):
    return {f"{path}:{line}" for path, line, _ in tidy.RULES[rule](Tree.of_folder(folder))}


class Fixtures(unittest.TestCase):
    def test_every_rule_has_one(self):
        self.assertEqual({path.name for path in FIXTURES.iterdir()} | MADE_HERE, set(tidy.RULES))

    def test_each_finds_what_is_expected(self):
        for folder in sorted(FIXTURES.iterdir()):
            with self.subTest(rule=folder.name):
                expected = set((folder / "expected.txt").read_text().split())
                self.assertTrue(expected)
                self.assertEqual(found(folder.name, folder), expected)


class Sizes(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)

    def write(self, name, text):
        (pathlib.Path(self.folder.name) / name).write_text(text)

    def test_a_blob_over_the_limit(self):
        self.write("large.bin", "x" * (rules.BLOB_BYTES_MAX + 1))
        self.write("fits.bin", "x" * rules.BLOB_BYTES_MAX)
        self.assertEqual(found("blob_size", self.folder.name), {"large.bin:1"})

    def test_a_file_over_the_limit(self):
        self.write("long.cc", "\n" * (rules.FILE_LINES_MAX + 1))
        self.write("fits.cc", "\n" * rules.FILE_LINES_MAX)
        self.assertEqual(found("file_lines", self.folder.name), {"long.cc:501"})

    def test_functions_over_the_limit_in_each_language(self):
        body = rules.FUNCTION_LINES_MAX - 2
        for name, over in (("long", 1), ("fits", 0)):
            self.write(f"{name}.py", "import os\ndef f():\n" + "    pass\n" * (body + 1 + over))
            self.write(f"{name}.cmake", "\nfunction(f)\n" + "set(a 1)\n" * (body + over)
                       + "endfunction()\n")
            self.write(f"{name}.cc", "namespace a {\nint F(int x) {\n" + "  if (x) {}\n"
                       * (body + over) + "}\n}  // namespace a\n")
        self.assertEqual(found("function_lines", self.folder.name),
                         {"long.py:2", "long.cmake:2", "long.cc:2"})

    def test_methods_constructors_and_tables_of_cpp(self):
        filler = "    x = '{';  // }\n" * rules.FUNCTION_LINES_MAX
        self.write("a.cc", "class A {\n public:\n  A()\n      : a_{1}, b_{2} {\n" + filler
                   + "  }\n  void Short() { x(); }\n};\nconst int kTable[] = {\n" + filler
                   + "};\ntemplate <typename T>\nvoid G() {\n" + filler + "}\n")
        first_of_g = 7 + 1 + 1 + 2 * rules.FUNCTION_LINES_MAX + 1
        self.assertEqual(found("function_lines", self.folder.name),
                         {"a.cc:3", f"a.cc:{first_of_g}"})


class Exceptions(unittest.TestCase):
    def findings(self, exceptions):
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder)
            (root / "tests/tidy").mkdir(parents=True)
            (root / tidy.EXCEPTIONS).write_text(exceptions)
            (root / "large.bin").write_text("x" * (rules.BLOB_BYTES_MAX + 1))
            return [(rule, path) for rule, path, _, _ in tidy.findings(Tree.of_folder(root))]

    def test_one_hides_its_finding(self):
        self.assertEqual(self.findings("# why\nblob_size large.bin  # real input\n"), [])

    def test_one_that_hides_nothing_is_a_finding(self):
        self.assertEqual(self.findings("blob_size large.bin\ncolumns large.bin\n"),
                         [("exception", tidy.EXCEPTIONS)])


if __name__ == "__main__":
    unittest.main()
