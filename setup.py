# SPDX-License-Identifier: Apache-2.0
"""Build the native rooms ahead of time, without linking PyTorch or the CUDA driver.

At the root, for every room, or inside one room's folder, for that room alone::

    python setup.py build_ext --inplace

The extension module is left beside the ``__init__.py`` that imports it. Objects are kept under
``build/native`` at the root (never in a room, whose folder may stand on ``PYTHONPATH``) and are
reused while their source, the room's headers and the compile command are unchanged.

Environment:

* ``BUILD_<ROOM>=0`` (``BUILD_FLASH_SAMPLE``, ``BUILD_VLLM_ADD_LLADA``, ``BUILD_VMM_ALLOCATOR``,
  ``BUILD_GATHER_GEMM``) leaves a room out.
* ``NATIVE_CUDA_ARCHS`` (default ``80 90a 100``) lists the targets; those that the toolkit does not
  know are left out.
* ``CUDA_HOME`` names the toolkit; otherwise ``nvcc`` is looked up on ``PATH`` and in
  ``/usr/local/cuda/bin``.
* ``MAX_JOBS`` (default: the number of processors) bounds the compilers run at once.
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

try:
    from setuptools import Extension, setup
    from setuptools.command.build_ext import build_ext
except ImportError:
    sys.exit("setuptools not found: python -m pip install -r requirements/build.txt")

ROOT = Path(__file__).resolve().parent
OBJECTS = ROOT / "build" / "native"
DEFAULT_ARCHS = "80 90a 100"


class BuildError(Exception):
    """A build that cannot go on; the message names what is missing or what failed."""


@dataclass(frozen=True)
class Room:
    """One native room: where it lies, its packages, and the extension (if any) compiled for it."""

    name: str  # its switch is BUILD_<NAME>
    folder: str  # holds the room's setup.py, relative to the root
    packages: tuple[str, ...]  # Python packages that the room consists of
    extension: str | None = None  # dotted name of the compiled module

    @property
    def root_package(self) -> str:
        return self.packages[-1]

    @property
    def is_enabled(self) -> bool:
        return os.environ.get(f"BUILD_{self.name.upper()}", "1") != "0"

    @property
    def source_folder(self) -> Path:
        """The folder of the package that the extension belongs to."""
        assert self.extension is not None
        return ROOT.joinpath(*self.extension.split(".")[:-1])

    def sources(self) -> list[Path]:
        """Sources of the extension: every .cu and .cpp of its package's folder."""
        return sorted(
            path for path in self.source_folder.iterdir() if path.suffix in (".cu", ".cpp")
        )

    def headers(self) -> list[Path]:
        return sorted(
            path for path in self.source_folder.iterdir() if path.suffix in (".h", ".cuh")
        )


ROOMS = (
    Room("flash_sample", "flash_sample", ("flash_sample",), "flash_sample._flash_sample"),
    Room(
        "vllm_add_llada",
        "vllm_add_llada/cuda_kernels",
        (
            "vllm_add_llada",
            "vllm_add_llada.cuda_kernels.fused_ops",
            "vllm_add_llada.cuda_kernels",
        ),
        "vllm_add_llada.cuda_kernels.fused_ops._fused_ops",
    ),
    Room("vmm_allocator", "vmm_allocator", ("vmm_allocator",), "vmm_allocator._vmm_allocator"),
    # Its Triton kernels are compiled at first use.
    Room("gather_gemm", "gather_gemm", ("gather_gemm",), "gather_gemm._gather_gemm"),
)


def find_nvcc(room: Room) -> str:
    """Path of the CUDA compiler: ``$CUDA_HOME/bin``, ``PATH``, then ``/usr/local/cuda/bin``."""
    cuda_home = os.environ.get("CUDA_HOME")
    found = (
        shutil.which("nvcc", path=str(Path(cuda_home) / "bin"))
        if cuda_home
        else shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    )
    if found is None:
        where = f"in CUDA_HOME={cuda_home}" if cuda_home else "on PATH"
        raise BuildError(
            f"{room.name}: nvcc not found {where}: install the CUDA toolkit or set CUDA_HOME "
            f"(BUILD_{room.name.upper()}=0 leaves this room out)"
        )
    return found


def include_flags(room: Room) -> list[str]:
    """Include folders of Python and pybind11."""
    python_include = sysconfig.get_paths()["include"]
    if not (Path(python_include) / "Python.h").exists():
        raise BuildError(
            f"{room.name}: Python.h not found in {python_include}: install python3-dev"
        )
    try:
        import pybind11
    except ImportError:
        raise BuildError(
            f"{room.name}: pybind11 not found: python -m pip install -r requirements/build.txt"
        ) from None
    return [f"-I{python_include}", f"-I{pybind11.get_include()}"]


def arch_flags(nvcc: str) -> list[str]:
    """Machine code for each target that the toolkit knows; PTX of the first for all other cards."""
    known = set(re.findall(r"compute_(\d+)", run([nvcc, "--list-gpu-arch"])))
    wanted = os.environ.get("NATIVE_CUDA_ARCHS", DEFAULT_ARCHS).replace(",", " ").replace(";", " ")
    archs = [arch for arch in wanted.split() if arch.rstrip("af") in known]
    if not archs:
        raise BuildError(f"NATIVE_CUDA_ARCHS={wanted!r}: none of these is known to {nvcc}")
    flags = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in archs]
    if archs[0].isdigit():
        flags.append(f"-gencode=arch=compute_{archs[0]},code=compute_{archs[0]}")
    return flags


def run(command: Sequence[str]) -> str:
    """Run a tool and return its standard output; a failure shows the tool's own words."""
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise BuildError(f"{' '.join(command)}\n{result.stdout}{result.stderr}".rstrip())
    if result.stderr:
        sys.stderr.write(result.stderr)
    return result.stdout


def is_stale(output: Path, command: Sequence[str], inputs: Iterable[Path]) -> bool:
    """Whether ``output`` must be made: missing, older than an input, or made by another command."""
    record = output.with_name(output.name + ".command")
    if not output.exists() or not record.exists() or record.read_text() != "\n".join(command):
        return True
    made = output.stat().st_mtime_ns
    return any(path.stat().st_mtime_ns > made for path in inputs)


def make(output: Path, command: Sequence[str], inputs: Iterable[Path]) -> None:
    """Run ``command``, which writes ``output``, unless that is up to date."""
    if not is_stale(output, command, inputs):
        return
    sys.stdout.write(f"{output.name} <- {' '.join(path.name for path in inputs)}\n")
    output.parent.mkdir(parents=True, exist_ok=True)
    run(command)
    output.with_name(output.name + ".command").write_text("\n".join(command))


def build_extension(room: Room, output: Path) -> None:
    """Compile the room's sources in parallel and link them, with static cudart, into ``output``."""
    nvcc = find_nvcc(room)
    flags = ["-O3", "-std=c++17", "-Xcompiler=-fPIC,-fvisibility=hidden,-Wall"]
    device_flags = [*flags, *arch_flags(nvcc)]
    host_flags = [*flags, *include_flags(room)]
    # One folder for each interpreter: objects of the bindings depend on Python's headers.
    folder = OBJECTS / room.name / str(sysconfig.get_config_var("SOABI"))
    headers = room.headers()

    def compile_source(source: Path) -> Path:
        target = folder / f"{source.name}.o"
        chosen = device_flags if source.suffix == ".cu" else host_flags
        make(target, [nvcc, *chosen, "-c", str(source), "-o", str(target)], [source, *headers])
        return target

    max_jobs = int(os.environ.get("MAX_JOBS") or os.cpu_count() or 1)
    with ThreadPoolExecutor(max_jobs) as pool:
        objects = list(pool.map(compile_source, room.sources()))
    # Linked beside the objects, so that the record of the command stays out of the room.
    linked = folder / output.name
    names = [str(path) for path in objects]
    make(linked, [nvcc, "-shared", "-cudart=static", *names, "-ldl", "-o", str(linked)], objects)
    output.parent.mkdir(parents=True, exist_ok=True)
    if not output.exists() or output.stat().st_mtime_ns < linked.stat().st_mtime_ns:
        partial = output.with_name(output.name + ".partial")
        shutil.copyfile(linked, partial)
        partial.replace(output)  # never overwrite a module that a running process has mapped


class BuildNative(build_ext):
    """``build_ext`` that hands each extension to nvcc; what is missing stops it with one line."""

    rooms: tuple[Room, ...] = ()

    def run(self) -> None:
        """Build every extension of the chosen rooms straight into its place."""
        by_extension = {room.extension: room for room in self.rooms}
        for extension in self.extensions:
            output = Path(self.get_ext_fullpath(extension.name)).resolve()
            try:
                build_extension(by_extension[extension.name], output)
            except BuildError as error:
                sys.exit(str(error))


def main(room_name: str | None) -> None:
    """Run setuptools for all rooms from the root (None), or for one room from inside its folder."""
    if room_name is None:
        rooms = ROOMS
        package_dir = {"": "."}
        os.chdir(ROOT)
    else:
        rooms = tuple(room for room in ROOMS if room.name == room_name)
        package_dir = {rooms[0].root_package: "."}
        os.chdir(ROOT / rooms[0].folder)
    rooms = tuple(room for room in rooms if room.is_enabled)
    setup(
        name="mosaic-native",
        version="0.1.0",
        packages=[package for room in rooms for package in room.packages]
        if room_name is None
        else [],
        package_dir=package_dir,
        package_data={"": ["*.pyi", "py.typed"]},
        ext_modules=[
            Extension(room.extension, [str(source) for source in room.sources()])
            for room in rooms
            if room.extension is not None
        ],
        cmdclass={"build_ext": type("build_ext", (BuildNative,), {"rooms": rooms})},
    )


if __name__ == "__main__":
    main(globals().get("ROOM"))  # a room's own setup.py runs this file with ROOM set
