"""clang-tidy as a test: python3 tests/tidy/clang_tidy.py BUILD_DIR [--except] FOLDER [FOLDER...].

Checks the sources of those folders (relative to the repository), or of all others, that BUILD_DIR
compiles. A source that was clean is not read again until it, a header it includes, .clang-tidy or
its command changes.
"""

import hashlib
import json
import pathlib
import re
import subprocess
import sys
import time

import llvm

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
FILE_SECONDS_MAX = 180


def sources(build, folders, excepted):
    """(path, compile command) of each C++ source in the folders, or in no folder that is excepted;
    generated ones are left out."""
    commands = json.loads((build / "compile_commands.json").read_text())
    for entry in commands:
        path = pathlib.Path(entry["file"])
        if path.suffix == ".cc" and REPOSITORY in path.parents and build not in path.parents:
            if any(REPOSITORY / folder in path.parents for folder in folders) != excepted:
                yield path, entry


def fingerprint(path, entry):
    """Digest of all that clang-tidy's answer rests on but the compiler and system headers."""
    command = re.sub(r"^\S*ccache\s+", "", entry["command"])
    command = re.sub(r"\s-o\s+\S+|\s-c\b", " ", command) + " -MM"
    done = subprocess.run(command, shell=True, cwd=entry["directory"], check=False,
                          capture_output=True, text=True, timeout=FILE_SECONDS_MAX)
    if done.returncode != 0:
        sys.exit(f"{path} does not preprocess:\n{done.stderr}")
    digest = hashlib.sha256(command.encode())
    checks = [file for file in (folder / ".clang-tidy" for folder in path.parents) if file.exists()]
    for name in [*done.stdout.replace("\\\n", " ").split()[1:], *checks]:
        digest.update((pathlib.Path(entry["directory"]) / name).read_bytes())
    return digest.hexdigest()


def check(path, entry, build, clean, clang_tidy):
    """True when clang-tidy finds nothing in one source."""
    key = fingerprint(path, entry)
    stamp = clean / key
    if stamp.exists():
        return True
    start = time.monotonic()
    done = subprocess.run([clang_tidy, "-p", build, "--quiet", path], check=False,
                          capture_output=True, text=True, timeout=FILE_SECONDS_MAX)
    word = "clean" if done.returncode == 0 else "FINDINGS"
    print(f"{time.monotonic() - start:6.1f} s  {path.relative_to(REPOSITORY)}: {word}", flush=True)
    if done.returncode != 0:
        print(done.stdout, done.stderr)
        return False
    stamp.touch()
    return True


def main():
    build = pathlib.Path(sys.argv[1]).resolve()
    clean = build / "clang_tidy_clean"
    clean.mkdir(exist_ok=True)
    excepted = sys.argv[2] == "--except"
    clang_tidy = llvm.tool("clang-tidy")
    results = [check(path, entry, build, clean, clang_tidy)
               for path, entry in sources(build, sys.argv[2 + excepted:], excepted)]
    print(f"{len(results)} sources, {results.count(False)} with findings")
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
