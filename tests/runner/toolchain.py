"""What the tests need besides packages: a Python environment and nvcc, both under build/."""

import hashlib
import os
import pathlib
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
VENV = ROOT / "build" / "venv"
VENV_PYTHON = VENV / "bin" / "python3"
CUDA = ROOT / "build" / "cuda-pypi"
HF_VENV = ROOT / "build" / "venv-hf"
HF_TESTS = ROOT / "tests" / "hf"
SYSTEM_NVCC = pathlib.Path("/usr/local/cuda/bin/nvcc")
# A toolkit root comes together from these; their minor version is one release of CUDA.
CUDA_PACKAGES = [f"nvidia-{part}==13.0.*"
                 for part in ("cuda-nvcc", "cuda-runtime", "cuda-crt", "cuda-cccl", "nvvm")]
PIP_SECONDS_MAX = 900

PROBE = """
#include <cuda_bf16.h>
#include <cuda/barrier>
__global__ void Probe(__nv_bfloat16* x) { x[threadIdx.x] = __float2bfloat16(1.0F); }
int main() { Probe<<<1, 32>>>(nullptr); return 0; }
"""


class ToolchainError(Exception):
    """Something could not be had; the text says what and what to do."""


def _run(command, what, seconds):
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        raise ToolchainError(f"{what} took more than {seconds} s; is the network slow?") from None
    if done.returncode != 0:
        raise ToolchainError(f"{what} failed; its message stands above")


def ensure_venv():
    """build/venv with exactly the versions of tests/requirements.txt; quick when it is there."""
    _ensure_venv(VENV, {ROOT / "tests" / "requirements.txt": []})


def ensure_hf_venv():
    """build/venv-hf: torch, transformers of today, those of before in its folder transformers4, and
    two small models. Some gigabytes, a few minutes; quick when it is there."""
    _ensure_venv(HF_VENV, {
        HF_TESTS / "requirements.txt": ["--no-compile"],  # Python does, of the part that is read
        HF_TESTS / "models.txt": ["--no-deps"],  # which would build a whole engine
        HF_TESTS / "transformers4.txt": ["--no-deps", "--target", HF_VENV / "transformers4"]})


def _ensure_venv(venv, requirements):
    """Files of requirements, and how pip takes each."""
    stamp, python = venv / "requirements.sha256", venv / "bin" / "python3"
    pins = b"".join(path.read_bytes() for path in requirements)
    wanted = hashlib.sha256(pins + sys.version.encode()).hexdigest()
    if python.exists() and stamp.exists() and stamp.read_text() == wanted:
        return
    name = venv.relative_to(ROOT)
    print(f"python: making {name}", flush=True)
    _run([sys.executable, "-m", "venv", "--clear", venv], "python3 -m venv", 120)
    for path, arguments in requirements.items():
        _run([python, "-m", "pip", "install", "--disable-pip-version-check", "-q", *arguments,
              "-r", path], f"pip install of {path.relative_to(ROOT)}", PIP_SECONDS_MAX)
    stamp.write_text(wanted)
    print(f"python: {name} is there", flush=True)


def find_nvcc():
    """The system's nvcc, or None."""
    on_path = shutil.which("nvcc")
    if on_path:
        return pathlib.Path(on_path)
    return SYSTEM_NVCC if SYSTEM_NVCC.exists() else None


def ensure_nvcc():
    """An nvcc that compiles for sm_90a: the system's, else one from PyPI in build/cuda-pypi."""
    nvcc = find_nvcc()
    if nvcc is not None:
        return nvcc
    nvcc = CUDA / "bin" / "nvcc"
    if not nvcc.exists():
        _fetch_cuda()
    return nvcc


def _fetch_cuda():
    print("cuda: no nvcc here; fetching one from PyPI into build/cuda-pypi", flush=True)
    staging = CUDA.with_name("cuda-pypi.part")
    shutil.rmtree(staging, ignore_errors=True)
    shutil.rmtree(CUDA, ignore_errors=True)
    _run([VENV_PYTHON, "-m", "pip", "install", "--disable-pip-version-check", "-q", "--no-deps",
          "--target", staging, *CUDA_PACKAGES], "pip install of nvcc", PIP_SECONDS_MAX)
    root = staging / "nvidia" / "cu13"
    if not (root / "bin" / "nvcc").exists():
        raise ToolchainError("the nvcc package of PyPI has no nvidia/cu13/bin/nvcc; "
                             "see CUDA_PACKAGES in tests/runner/toolchain.py")
    (root / "lib64").symlink_to("lib")  # where nvcc looks for the runtime
    _probe(root)
    os.replace(root, CUDA)
    shutil.rmtree(staging)


def _probe(root):
    source = root / "probe.cu"
    source.write_text(PROBE)
    _run([root / "bin" / "nvcc", "-std=c++20", "-cudart=static",
          "-gencode=arch=compute_90a,code=sm_90a", "-o", root / "probe", source],
         "compiling a probe with the nvcc from PyPI", 120)
    source.unlink()
    (root / "probe").unlink()
