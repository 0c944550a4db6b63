"""Layout as a test: fails and shows the places where clang-format would change a file of ours."""

import pathlib
import subprocess
import sys

import llvm
from tree import CXX, Tree

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]


def main():
    files = Tree.of_repository(REPOSITORY).with_suffix(*CXX, ".proto")
    command = [llvm.tool("clang-format"), "--dry-run", "-Werror", *files]
    done = subprocess.run(command, cwd=REPOSITORY, check=False)
    print(f"{len(files)} files; clang-format -i FILE mends one")
    return 1 if done.returncode or not files else 0


if __name__ == "__main__":
    sys.exit(main())
