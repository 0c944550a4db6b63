"""Makes fp8kvd/v1/*_pb2.py from proto/ while the package is built; they are never committed."""

import pathlib
import shutil

import setuptools
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

HERE = pathlib.Path(__file__).resolve().parent
PROTOS = [pathlib.Path("fp8kvd/v1") / name for name in ("kv.proto", "accuracy.proto")]


def proto_root() -> pathlib.Path:
    """proto/ beside this file in a source distribution, at the repository's root in a checkout."""
    for root in (HERE / "proto", HERE.parents[1] / "proto"):
        if (root / PROTOS[0]).is_file():
            return root
    raise SystemExit(f"{PROTOS[0]} is neither under {HERE / 'proto'} nor in a checkout around it; "
                     "build from a checkout of fp8kvd or from a source distribution")


class BuildWithStubs(build_py):
    """Puts the stubs into the wheel; into the source tree for an editable install."""

    def run(self) -> None:
        super().run()
        from grpc_tools import protoc

        target = HERE if self.editable_mode else pathlib.Path(self.build_lib)
        root = proto_root()
        arguments = [f"-I{root}", f"--python_out={target}", f"--pyi_out={target}"]
        target.mkdir(parents=True, exist_ok=True)
        if protoc.main(["protoc", *arguments, *(str(root / proto) for proto in PROTOS)]) != 0:
            raise SystemExit(f"protoc refused what is in {root}; its message stands above")
        (target / "fp8kvd/v1/__init__.py").touch()


class SdistWithProto(sdist):
    """Takes proto/ along, since a source distribution has no checkout around it."""

    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        super().make_release_tree(base_dir, files)
        for proto in PROTOS:
            target = pathlib.Path(base_dir) / "proto" / proto
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(proto_root() / proto, target)


setuptools.setup(cmdclass={"build_py": BuildWithStubs, "sdist": SdistWithProto})
