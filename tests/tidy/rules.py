"""The rules about one file at a time. Each takes a Tree and yields (path, line, message)."""

import ast
import pathlib
import re

from tree import CXX, HEADERS, folder_of

COLUMNS_MAX = 100
FUNCTION_LINES_MAX = 70
FILE_LINES_MAX = 500
BLOB_BYTES_MAX = 256 * 1024

PRODUCT = ("config/", "cache/", "kernels/", "server/", "client/")


def columns(tree):
    for path in tree.code():
        for number, line in tree.lines(path):
            if len(line) > COLUMNS_MAX:
                yield path, number, f"{len(line)} columns, at most {COLUMNS_MAX}"


def file_lines(tree):
    for path in tree.code():
        count = tree.text(path).count("\n")
        if count > FILE_LINES_MAX:
            yield path, count, f"{count} lines, at most {FILE_LINES_MAX}: split it by its jobs"


def function_lines(tree):
    finders = {".py": _python_functions, ".cmake": _cmake_functions}
    for path in tree.code():
        suffix = pathlib.PurePosixPath(path).suffix
        finder = finders.get(suffix, _cxx_functions if suffix in CXX else None)
        for first, last in finder(tree, path) if finder else ():
            if last - first + 1 > FUNCTION_LINES_MAX:
                yield path, first, (f"a function of {last - first + 1} lines, "
                                    f"at most {FUNCTION_LINES_MAX}")


def _python_functions(tree, path):
    for node in ast.walk(ast.parse(tree.text(path))):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node.lineno, node.end_lineno


def _cmake_functions(tree, path):
    first = None
    for number, line in tree.lines(path):
        if re.match(r"(function|macro)\(", line):
            first = number
        elif re.match(r"end(function|macro)\(", line) and first:
            yield first, number


_BEFORE_HEAD = re.compile(r"(\s|(public|private|protected)\s*:)*")
_SCOPE = re.compile(r"\b(namespace|class|struct|union|enum|extern)\b[^()]*$|^\s*extern\b")


def _cxx_functions(tree, path):
    """Bodies whose brace opens in a namespace or a class and whose head has parentheses."""
    text = re.sub(r"^[ \t]*#.*?(?<!\\)$", lambda m: re.sub(r"[^\n]", " ", m.group(0)),
                  tree.bare(path), flags=re.DOTALL | re.MULTILINE)
    stack = []  # (kind, offset of the head)
    head_start = 0
    for match in re.finditer(r"[{};]", text):
        at = match.start()
        head = text[head_start:at]
        if match.group(0) == "{":
            in_scope = all(kind == "scope" for kind, _ in stack)
            if in_scope and re.search(r"[\w>=]$", head) or head.endswith("= "):
                stack.append(("init", head_start))
                continue  # an initialiser's brace: the head goes on behind it
            kind = "scope" if _SCOPE.search(head) else "function" if "(" in head else "block"
            stack.append((kind if in_scope else "block",
                          head_start + _BEFORE_HEAD.match(head).end()))
        elif match.group(0) == "}" and stack:
            kind, start = stack.pop()
            if kind == "function":
                yield text.count("\n", 0, start) + 1, text.count("\n", 0, at) + 1
            elif kind == "init":
                head_start = start
                continue
        head_start = at + 1


def using_namespace(tree):
    for path in tree.with_suffix(*HEADERS):
        if path.startswith("kernels/cpu/") and path.endswith("-inl.h"):
            continue  # Highway's idiom: one namespace per target
        for number, line in tree.bare_lines(path):
            if re.search(r"\busing\s+namespace\b", line):
                yield path, number, "using namespace in a header"


def pragma_once(tree):
    for path in tree.with_suffix(*HEADERS):
        toggled = "HWY_TARGET_TOGGLE" in tree.text(path)  # read once per Highway target
        if not toggled and not re.search(r"^#pragma once$", tree.text(path), re.MULTILINE):
            yield path, 1, "a header without #pragma once"


def todo(tree):
    for path in tree.paths:
        if path.startswith("tests/tidy/"):
            continue
        for number, line in tree.lines(path):
            if re.search(r"\b(TODO|FIXME|XXX)\b(?!\(#\d+\))", line):
                yield path, number, "a TODO names its issue: (#N) behind it"


def machine_path(tree):
    pattern = re.compile(r"(?:^|[\s\"'`=(:])/(?:wor[k]|roo[t]|hom[e])/|\.\./share[d]\b")
    for path in tree.paths:
        for number, line in tree.lines(path):
            if pattern.search(line):
                yield path, number, "a path of somebody's machine"


def blob_size(tree):
    for path in tree.paths:
        size = (tree.root / path).stat().st_size
        if size > BLOB_BYTES_MAX:
            yield path, 1, f"{size} bytes, at most {BLOB_BYTES_MAX}"


def file_name(tree):
    for path in tree.with_suffix(*CXX, ".py", ".proto"):
        name = pathlib.PurePosixPath(path).stem
        if not re.fullmatch(r"_*[a-z0-9]+(_[a-z0-9]+)*_*(-inl)?", name):
            yield path, 1, "a file name is snake_case"


def _product(tree):
    return [path for path in tree.with_suffix(*CXX) if path.startswith(PRODUCT)]


def mutex(tree):
    for path in tree.with_suffix(*CXX):
        for number, line in tree.bare_lines(path):
            if re.search(r"\babsl::(Mutex|CondVar)|absl/synchronization/", line):
                yield path, number, "std::mutex: Debian's absl is not built for thread sanitizer"


def ends_process(tree):
    pattern = re.compile(r"(?<!static_)\bassert\(|\b(_?exit|_Exit|quick_exit|abort|terminate)\("
                         r"|\bthrow\b|<cassert>")
    for path in _product(tree):
        if path == "config/base/check.h":
            continue
        for number, line in tree.bare_lines(path):
            if pattern.search(line):
                yield path, number, "FP8KVD_CHECK for a bug of ours, a Status for all else"


def pure_folder(tree):
    pattern = re.compile(r"\bstd::(chrono|this_thread|j?thread|async|cout|cerr|clog)\b|\bspdlog\b"
                         r"|\b(clock_gettime|gettimeofday|pthread_create|f?printf|puts|getenv)\(")
    for path in _product(tree):
        if path.startswith(("cache/", "kernels/")):
            for number, line in tree.bare_lines(path):
                if pattern.search(line):
                    yield path, number, "no clock, no thread, no log in cache/ and kernels/"


def words(tree):
    table = dict(re.split(r"\s*\|\s*", line) for _, line in tree.lines("tests/tidy/words.txt")
                 if line and not line.startswith("#"))
    pattern = re.compile(rf"\b({'|'.join(table)})_?\b")
    for path in tree.with_suffix(*CXX, ".proto"):
        for number, line in tree.bare_lines(path):
            for match in pattern.finditer(line):
                yield path, number, f"{match.group(1)}: our word is {table[match.group(1)]}"


def link(tree):
    present = set(tree.paths) | {parent.as_posix() for path in tree.paths
                                 for parent in pathlib.PurePosixPath(path).parents}
    for path in tree.with_suffix(".md"):
        prose = re.sub(r"```.*?```", lambda m: "\n" * m.group(0).count("\n"), tree.text(path),
                       flags=re.DOTALL)
        for number, line in enumerate(prose.split("\n"), 1):
            for target in re.findall(r"\]\(([^)\s]+)\)", line):
                if re.match(r"[a-z]+:|#", target):
                    continue
                parts = []
                for part in f"{folder_of(path)}/{target.split('#')[0]}".split("/"):
                    if part == ".." and parts:
                        parts.pop()
                    elif part not in ("", "."):
                        parts.append(part)
                if "/".join(parts) not in present:
                    yield path, number, f"a link to {target}, which does not exist"
