"""The files that the style rules read, and C++ with its strings and comments blanked out."""

import functools
import pathlib
import re
import subprocess

CXX = {".h", ".cc", ".cu", ".cuh"}
HEADERS = {".h", ".cuh"}
CODE = CXX | {".py", ".proto", ".cmake"}
FIXTURES = "tests/tidy/fixtures/"

# Raw strings, comments, strings and characters, in the order in which they must be tried.
_HIDDEN = re.compile(
    r'R"([^()\s]{0,16})\(.*?\)\1"|//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"'
    r"|(?<![0-9A-Za-z_])'(?:\\.|[^'\\\n])*'", re.DOTALL)
_INCLUDE = re.compile(r"^\s*#\s*include\b")


def git(root, *arguments):
    """What git prints, also where another user owns the checkout."""
    return subprocess.run(["git", "-c", "safe.directory=*", *arguments], cwd=root, check=True,
                          capture_output=True, text=True).stdout


class Tree:
    """A folder of sources: paths are relative to it, with forward slashes."""

    def __init__(self, root, paths):
        self.root = pathlib.Path(root)
        self.paths = sorted(paths)
        self._texts = {}

    @classmethod
    def of_repository(cls, root):
        listing = git(root, "ls-files", "-z", "-co", "--exclude-standard")
        paths = {path for path in listing.split("\0") if path and not path.startswith(FIXTURES)}
        return cls(root, [path for path in paths if (pathlib.Path(root) / path).is_file()])

    @classmethod
    def of_folder(cls, root):
        root = pathlib.Path(root)
        return cls(root, [p.relative_to(root).as_posix() for p in root.rglob("*") if p.is_file()])

    def text(self, path):
        """The file as text; empty when it is not text or not there."""
        if path not in self._texts:
            data = (self.root / path).read_bytes() if path in self.paths else b""
            binary = b"\0" in data[:8192]
            self._texts[path] = "" if binary else data.decode("utf-8", errors="replace")
        return self._texts[path]

    def lines(self, path):
        """(line number, line) pairs, from 1."""
        return enumerate(self.text(path).split("\n"), 1)

    def with_suffix(self, *suffixes):
        return [path for path in self.paths if pathlib.PurePosixPath(path).suffix in suffixes]

    def code(self):
        """Everything that is read as code: by its suffix, as a CMakeLists.txt or by its #!."""
        return [path for path in self.paths
                if pathlib.PurePosixPath(path).suffix in CODE or path.endswith("CMakeLists.txt")
                or self.text(path).startswith("#!")]

    @functools.lru_cache(maxsize=None)
    def bare(self, path):
        """C++ text of the same lines and columns without strings and comments, includes kept."""
        return _HIDDEN.sub(_blank, self.text(path))

    def bare_lines(self, path):
        return enumerate(self.bare(path).split("\n"), 1)


def _blank(match):
    text = match.group(0)
    line_start = match.string.rfind("\n", 0, match.start()) + 1
    if text[0] == '"' and _INCLUDE.match(match.string[line_start:match.start()] + '"'):
        return text
    return re.sub(r"[^\n]", " ", text)


def folder_of(path):
    return path.rpartition("/")[0]
