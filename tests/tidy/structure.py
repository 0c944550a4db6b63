"""The rules about how files hang together: targets, layers, budgets, history."""

import pathlib
import re
import sys

from tree import CXX, folder_of, git

SUBJECT_CHARS_MAX = 72

# Outside headers by their first words; what is not here must be a file of ours or of the system.
VENDORS = [("absl/", "absl"), ("google/protobuf/", "protobuf"), ("grpc/", "grpcpp"),
           ("grpcpp/", "grpcpp"), ("hwy/", "hwy"), ("cuda", "cuda"), ("nv", "cuda"),
           ("cooperative_groups", "cuda"), ("spdlog/", "spdlog"), ("fmt/", "spdlog"),
           ("prometheus/", "prometheus"), ("civetweb", "civetweb"), ("CivetServer", "civetweb"),
           ("xxhash", "xxhash"), ("gtest/", "gtest"), ("gmock/", "gtest"),
           ("benchmark/", "benchmark")]


def _cmake_tokens(tree):
    """Words of every CMakeLists.txt, as they stand and as paths from the root."""
    tokens = set()
    for path in tree.paths:
        if path.rpartition("/")[2] != "CMakeLists.txt" and not path.endswith(".cmake"):
            continue
        text = re.sub(r"#[^\n]*", "", tree.text(path))
        text = text.replace("${CMAKE_SOURCE_DIR}/", "/").replace("${CMAKE_CURRENT_SOURCE_DIR}/", "")
        for token in re.findall(r"[^\s()\";]+", text):
            tokens.add(token)
            tokens.add(token[1:] if token[0] == "/" else f"{folder_of(path)}/{token}".lstrip("/"))
    return tokens


def listed_source(tree):
    tokens = _cmake_tokens(tree)
    for path in tree.with_suffix(*CXX, ".proto"):
        if path.startswith("tests/") and path.endswith(".h"):
            continue  # what only tests include is compiled with them
        if path not in tokens:
            yield path, 1, "no target lists it"


def budget(tree):
    tokens = _cmake_tokens(tree)
    for number, line in tree.lines("tests/budget.txt"):
        name = line.partition("#")[0].split()
        if name and (len(name) != 2 or not name[1].isdigit()):
            yield "tests/budget.txt", number, "a line is: test_name seconds  # why"
        elif name and name[0] not in tokens:
            yield "tests/budget.txt", number, f"{name[0]} is no test"


def layers(tree):
    table = {}
    for _, line in tree.lines("tests/tidy/layers.txt"):
        if line and not line.startswith("#"):
            folder, _, allowed = line.partition("|")
            table[folder.strip()] = allowed.split()
    ours = set(tree.paths)
    for path in tree.with_suffix(*CXX):
        layer = _layer(folder_of(path), table)
        if layer is None:
            yield path, 1, "its folder has no line in tests/tidy/layers.txt"
            continue
        for number, line in tree.bare_lines(path):
            match = re.match(r'\s*#\s*include\s+[<"]([^>"]+)[>"]', line)
            if match and "*" not in table[layer]:
                edge = _edge(match.group(1), ours, table)
                if edge and not _allowed(path, layer, edge, match.group(1), table[layer]):
                    yield path, number, f"{layer} may not include {match.group(1)} ({edge})"


def _layer(folder, table):
    """The longest folder of the table that holds this one."""
    while folder and folder not in table:
        folder = folder_of(folder)
    return folder or None


def _edge(header, ours, table):
    """What an include leans on: a vendor's word, a layer of ours, or None for the system's."""
    if header.endswith(".pb.h") and not header.startswith("google/"):
        return "grpcpp" if header.endswith(".grpc.pb.h") else "proto"
    for prefix, word in VENDORS:
        if header.startswith(prefix):
            return word
    if header in ours or _layer(folder_of(header), table):
        return _layer(folder_of(header), table)
    return None


def _allowed(path, layer, edge, header, allowed):
    if edge == layer:
        return True
    for entry in allowed:
        word, _, only = entry.partition("@")
        if word in (edge, header) and (not only or path.endswith(only)):
            return True
    return False


def subject(tree):
    """Of the commits since this rule stands; in a fixture, of the lines of subjects.txt."""
    if (tree.root / ".git").exists():
        since = git(tree.root, "log", "--diff-filter=A", "--format=%H", "--", __file__).split()
        log = git(tree.root, "log", "--no-merges", "--format=%h %s", "--abbrev=10",
                  *(["HEAD", f"^{since[-1]}"] if since else ["-1"]))
    else:
        log = tree.text("subjects.txt") if "subjects.txt" in tree.paths else ""
    for line in log.splitlines():
        commit, _, text = line.partition(" ")
        if len(text) > SUBJECT_CHARS_MAX:
            yield commit, 1, f"a subject of {len(text)} characters, at most {SUBJECT_CHARS_MAX}"
        elif not re.fullmatch(r"[\w./*+-]+(, [\w./*+-]+)*: [^\sA-Z].*[^.\s]", text):
            yield commit, 1, f"the subject of a commit is 'folder: imperative': {text}"


def python_only(tree):
    """tests/tidy and tests/runner import nothing that Python does not bring along."""
    for path in tree.with_suffix(".py"):
        if not path.startswith(("tests/tidy/", "tests/runner/")):
            continue
        beside = {pathlib.PurePosixPath(p).stem for p in tree.paths
                  if folder_of(p) == folder_of(path)}
        for number, line in tree.lines(path):
            match = re.match(r"\s*(?:import|from)\s+(\w+)", line)
            if match and match.group(1) not in sys.stdlib_module_names | beside:
                yield path, number, f"{match.group(1)} is not in Python's standard library"
