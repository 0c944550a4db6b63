"""The version of LLVM's tools that settles style: another one lays out and warns differently."""

import re
import shutil
import subprocess
import sys

VERSION = "14"
SKIPPED = 77  # the exit status that tests/tidy/CMakeLists.txt tells ctest of


def tool(name):
    """The command of clang-format or clang-tidy; without the right version the test is skipped."""
    for command in (f"{name}-{VERSION}", name):
        if shutil.which(command):
            text = subprocess.run([command, "--version"], check=True, capture_output=True,
                                  text=True).stdout
            version = re.search(r"version (\d+)", text)
            if version and version.group(1) == VERSION:
                return command
    print(f"skipped: needs {name} {VERSION}, the one of Debian 12")
    sys.exit(SKIPPED)
