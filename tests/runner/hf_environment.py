"""Makes the environment of the tests in tests/hf: tests/run starts this beside the build."""

import sys

import toolchain

if __name__ == "__main__":
    try:
        toolchain.ensure_hf_venv()
    except toolchain.ToolchainError as error:
        sys.exit(f"tests/run: {error}")
