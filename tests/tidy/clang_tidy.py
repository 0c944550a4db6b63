"""clang-tidy as a test: python3 tests/tidy/clang_tidy.py BUILD_DIR [--except] FOLDER [FOLDER...].

Checks the sources of those folders (relative to the repository), or of all others, that BUILD_DIR
compiles. A source that was clean is not read again until it, a header it includes, .clang-tidy or
its command changes. What is read is read joined: nearly all of clang-tidy's time goes by over
headers, and joined sources share theirs.
"""

import collections
import dataclasses
import functools
import hashlib
import json
import pathlib
import re
import shlex
import subprocess
import sys
import tempfile
import time

import llvm

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
RUN_SECONDS_MAX = 900
DOES_NOT_COMPILE = "[clang-diagnostic-error]"
_QUOTED = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)
_INCLUDE = re.compile(r'#include [<"]([^>"]+)[>"]')
_MAIN = re.compile(r"^int main\(", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Source:
    path: pathlib.Path
    flags: tuple  # of its compile command, without what names this source and its object

    @property
    def like(self):
        """What sources must have in common to be read joined: flags and the checks for them. One
        that has a main is like no other."""
        alone = self.path if _MAIN.search(self.path.read_text()) else None
        return self.flags, checks_of(self.path)[0].parent, alone


def sources(build, folders, excepted):
    """Each C++ source in the folders, or in no folder that is excepted; generated ones are left
    out."""
    for entry in json.loads((build / "compile_commands.json").read_text()):
        path = pathlib.Path(entry["file"])
        if path.suffix == ".cc" and REPOSITORY in path.parents and build not in path.parents:
            if any(REPOSITORY / folder in path.parents for folder in folders) != excepted:
                yield Source(path, flags_of(entry["command"]))


def flags_of(command):
    words = shlex.split(command)
    compiler = next(i for i, word in enumerate(words) if not word.endswith("ccache"))
    flags, words = [], iter(words[compiler + 1:])
    for word in words:
        if word in ("-o", "-c"):
            next(words)
        else:
            flags.append(word)
    return tuple(flags)


def checks_of(path):
    """The .clang-tidy files that hold for a source, the nearest first."""
    return [file for file in (folder / ".clang-tidy" for folder in path.parents) if file.exists()]


@functools.lru_cache(maxsize=None)
def included(file, folders):
    """A file and all that it includes by a name in quotes, found in these folders or beside it."""
    found, left = set(), [file]
    while left:
        file = left.pop()
        if file not in found:
            found.add(file)
            for name in _QUOTED.findall(file.read_text(errors="replace")):
                places = (folder / name for folder in (file.parent, *folders))
                left += [place for place in places if place.is_file()][:1]
    return found


def fingerprint(source):
    """Digest of all that clang-tidy's answer rests on but the compiler and system headers."""
    digest = hashlib.sha256(" ".join(source.flags).encode())
    folders = tuple(pathlib.Path(flag[2:]) for flag in source.flags if flag.startswith("-I"))
    for file in sorted(included(source.path, folders)) + checks_of(source.path):
        digest.update(file.read_bytes())
    return digest.hexdigest()


class Joined:
    """Sources one below the other as one text, and which of its lines is whose."""

    def __init__(self, parts):
        self._lines = []  # (source, its line, text)
        before = set()  # what an earlier source includes: a second time would be a finding
        for source in parts:
            names = set()
            for number, line in enumerate(source.path.read_text().split("\n"), 1):
                include = _INCLUDE.match(line)
                if include:
                    names.add(include[1])
                again = include and include[1] in before
                self._lines.append((source, number, "" if again else line))
            before |= names

    def text(self):
        return "\n".join(text for _, _, text in self._lines)

    def in_sources(self, output, file):
        """What clang-tidy prints of the joined file, with places in the sources, and which of them
        it says do not compile."""
        broken = set()

        def place(match):
            source, line, _ = self._lines[int(match[1]) - 1]
            if match[0].endswith(DOES_NOT_COMPILE):
                broken.add(source)
            return f"{source.path}:{line}{match[2]}"

        pattern = rf"^{re.escape(str(file))}:(\d+)(:.*)$"
        return re.sub(pattern, place, output, flags=re.MULTILINE), broken


def ask(parts):
    """Asks clang-tidy about sources that are alike: its exit status, what it prints, with places in
    the sources, and which of them do not compile where they stand."""
    joined = Joined(parts)
    clang_tidy = llvm.tool("clang-tidy")
    config = subprocess.run([clang_tidy, "--dump-config", parts[0].path], check=True,
                            capture_output=True, text=True, timeout=60).stdout
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "joined.cc"
        file.write_text(joined.text())
        done = subprocess.run([clang_tidy, "--quiet", f"--config={config}", file, "--",
                               *parts[0].flags, "-ferror-limit=0"], check=False,
                              capture_output=True, text=True, timeout=RUN_SECONDS_MAX)
    text, broken = joined.in_sources(done.stdout, file)
    return done.returncode, text + done.stderr, broken


def check(parts):
    """Prints what clang-tidy finds in sources that are alike; yields those that are clean. What
    does not compile joined (one name in two sources, say) is read apart."""
    start = time.monotonic()
    status, text, broken = ask(parts)
    if DOES_NOT_COMPILE in text and len(parts) > 1:
        apart = [source for source in parts[1:] if source in broken] or parts[1:]
        yield from check([source for source in parts if source not in apart])
        yield from check(apart)
        return
    more = f" and {len(parts) - 1} more" if len(parts) > 1 else ""
    word = "clean" if status == 0 else "FINDINGS"
    name = parts[0].path.relative_to(REPOSITORY)
    print(f"{time.monotonic() - start:6.1f} s  {name}{more}: {word}", flush=True)
    if status == 0:
        yield from parts
    else:
        print(text)


def main():
    build = pathlib.Path(sys.argv[1]).resolve()
    stamps = build / "clang_tidy_clean"
    stamps.mkdir(exist_ok=True)
    excepted = sys.argv[2] == "--except"
    asked = list(sources(build, sys.argv[2 + excepted:], excepted))
    alike = collections.defaultdict(list)
    for source in asked:
        if not (stamps / fingerprint(source)).exists():
            alike[source.like].append(source)
    left = sum(len(parts) for parts in alike.values())
    for parts in alike.values():
        for source in check(parts):
            (stamps / fingerprint(source)).touch()
            left -= 1
    print(f"{len(asked)} sources, {left} in texts with findings")
    return 0 if left == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
