# SPDX-License-Identifier: Apache-2.0
"""Build the native packages ahead of time, without linking PyTorch or the CUDA driver.

At the root, for every native package, or inside the folder of one, for that package alone::

    python setup.py build_ext --inplace

``pip install .`` makes a wheel of the project. Upstream's package has files of the same names, so
the wheel holds ours in a separate folder, which ``mosaic.pth`` puts first on the path. If the
native packages cannot be compiled, the wheel holds none of them, and the server logs this at its
start. pip hides the output of this file, unless it is run as ``pip install -v .``.

This file decides what is compiled and how. ninja decides what is out of date, and runs nvcc. The
extension module is written next to the ``__init__.py`` that imports it. Everything else is written
below ``build/native`` at the root (never to the folder of a native package, because that folder may
be on ``PYTHONPATH``).

Environment:

* ``BUILD_<PACKAGE>=0`` (``BUILD_FLASH_SAMPLE``, ``BUILD_VLLM_ADD_LLADA``, ``BUILD_VMM_ALLOCATOR``)
  leaves a native package out.
* ``NATIVE_CUDA_ARCHS`` lists the targets. The default is ``80 89 90a 100 120``. If the modules are
  built in the source tree, the default is reduced to the GPUs that nvidia-smi lists. Targets that
  the toolkit does not support are left out. PTX of the first target serves all other cards.
* ``CUDA_HOME`` names the toolkit; otherwise ``nvcc`` is looked up on ``PATH`` and in
  ``/usr/local/cuda/bin``.
* ``MAX_JOBS`` (default: the number of processors) limits the compilers that run at the same time.

If ``ccache`` is installed, it caches the compiled objects, also for other clones.
"""

import logging
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

try:
    from setuptools import Extension, setup
    from setuptools.command.build_ext import build_ext
    from setuptools.command.build_py import build_py
except ImportError:
    sys.exit("setuptools not found: python -m pip install -r requirements/build.txt")

ROOT = Path(__file__).resolve().parent
# One folder for each interpreter, because objects of the bindings depend on Python's headers.
FOLDER = ROOT / "build" / "native" / str(sysconfig.get_config_var("SOABI"))
DEFAULT_ARCHS = "80 89 90a 100 120"
# Targets by compute capability. Code for 8.0 also runs on 8.6.
ARCH_OF_CARD = {"8.0": "80", "8.6": "80", "8.9": "89", "9.0": "90a", "10.0": "100", "12.0": "120"}

OVERLAY = "mosaic_overlay"  # folder in the wheel
PACKAGES = ("vllm", "flash_sample", "gather_gemm", "vllm_add_llada", "vmm_allocator")
# Suffixes of the files of a package that the wheel includes.
KEPT = frozenset({".css", ".html", ".js", ".py", ".svg", ".txt", ".typed", ".woff2"})


STAMP = "vllm/diffusion/ops/build_stamp.py"
COST = "PyTorch replaces them, on a GPU slower and with more memory"


class BuildError(Exception):
    """A build that cannot continue; the message names the missing tool or the failed command."""


@dataclass(frozen=True)
class NativePackage:
    """One native package: its folder, and the extension that is compiled for it."""

    name: str  # BUILD_<NAME> switches it on and off
    folder: str  # holds the package's setup.py, relative to the root
    import_name: str  # dotted name of the Python package in the folder
    extension: str  # dotted name of the compiled module

    @property
    def is_enabled(self) -> bool:
        return os.environ.get(f"BUILD_{self.name.upper()}", "1") != "0"

    @property
    def inner(self) -> str:
        """The folder of the package that holds the extension, relative to the root."""
        return "/".join(self.extension.split(".")[:-1])

    def sources(self) -> list[Path]:
        """Return every .cu and .cpp file in the inner folder."""
        folder = ROOT / self.inner
        return sorted(path for path in folder.iterdir() if path.suffix in (".cu", ".cpp"))


NATIVE_PACKAGES = (
    NativePackage("flash_sample", "flash_sample", "flash_sample", "flash_sample._flash_sample"),
    NativePackage(
        "vllm_add_llada",
        "vllm_add_llada/cuda_kernels",
        "vllm_add_llada.cuda_kernels",
        "vllm_add_llada.cuda_kernels.fused_ops._fused_ops",
    ),
    NativePackage(
        "vmm_allocator", "vmm_allocator", "vmm_allocator", "vmm_allocator._vmm_allocator"
    ),
)


def find_nvcc(package: NativePackage) -> str:
    """Return the path of the CUDA compiler.

    It is looked up in ``$CUDA_HOME/bin`` if that is set, else on ``PATH``, then in
    ``/usr/local/cuda/bin``.
    """
    cuda_home = os.environ.get("CUDA_HOME")
    nvcc = (
        shutil.which("nvcc", path=str(Path(cuda_home) / "bin"))
        if cuda_home
        else shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    )
    if nvcc is None:
        where = f"in CUDA_HOME={cuda_home}" if cuda_home else "on PATH"
        raise BuildError(
            f"{package.name}: nvcc not found {where} (CUDA_HOME names the toolkit, "
            f"BUILD_{package.name.upper()}=0 leaves the package out)"
        )
    return nvcc


def include_flags(package: NativePackage) -> list[str]:
    """Return the flags for the include folders of Python and pybind11."""
    python_include = sysconfig.get_paths()["include"]
    if not (Path(python_include) / "Python.h").exists():
        raise BuildError(
            f"{package.name}: Python.h not found in {python_include}: install python3-dev"
        )
    try:
        import pybind11
    except ImportError:
        raise BuildError(
            f"{package.name}: pybind11 not found: python -m pip install -r requirements/build.txt"
        ) from None
    return [f"-I{python_include}", f"-I{relative(pybind11.get_include())}"]


def archs_of_cards() -> str:
    """Return the targets of this machine's GPUs, or all targets.

    All targets are returned if there is no GPU, or one that has no target.
    """
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return DEFAULT_ARCHS
    query = [smi, "--query-gpu=compute_cap", "--format=csv,noheader"]
    answer = subprocess.run(query, capture_output=True, text=True, check=False)
    cards = {line.strip() for line in answer.stdout.splitlines()}
    if answer.returncode != 0 or not cards:
        return DEFAULT_ARCHS
    others = cards - set(ARCH_OF_CARD)
    if others:
        names = ", ".join(sorted(others))
        logging.warning("no target of compute capability %s: compiled as PTX of 8.0", names)
        return DEFAULT_ARCHS
    archs = {ARCH_OF_CARD[card] for card in cards}
    return " ".join(arch for arch in DEFAULT_ARCHS.split() if arch in archs)


def arch_flags(nvcc: str, default: str) -> list[str]:
    """Return the flags for machine code of each supported target, and for PTX of the first one.

    The PTX serves all other cards.
    """
    listed = subprocess.run([nvcc, "--list-gpu-arch"], capture_output=True, text=True, check=False)
    if listed.returncode != 0:
        raise BuildError(f"{nvcc} --list-gpu-arch: {listed.stderr.strip()}")
    known = set(re.findall(r"compute_(\d+)", listed.stdout))
    wanted = os.environ.get("NATIVE_CUDA_ARCHS") or default

    def known_of(targets: str) -> list[str]:
        return [arch for arch in re.split(r"[,; ]+", targets) if arch.rstrip("af") in known]

    archs = known_of(wanted)
    if not archs and wanted == default:
        logging.warning("%s does not know %s: compiled for other cards, and as PTX", nvcc, wanted)
        archs = known_of(DEFAULT_ARCHS)
    if not archs:
        raise BuildError(f"NATIVE_CUDA_ARCHS={wanted!r}: none of these is known to {nvcc}")
    flags = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in archs]
    if archs[0].isdigit():
        flags.append(f"-gencode=arch=compute_{archs[0]},code=compute_{archs[0]}")
    return flags


def find_ninja(package: NativePackage) -> str:
    """Return the path of ninja: next to this interpreter, else on ``PATH``."""
    beside = str(Path(sys.executable).parent)
    ninja = shutil.which("ninja", path=beside) or shutil.which("ninja")
    if ninja is None:
        raise BuildError(
            f"{package.name}: ninja not found: python -m pip install -r requirements/build.txt"
        )
    return ninja


RULES = """
rule compile
  command = $launcher $nvcc $flags -MD -MF $out.d -c $in -o $out
  depfile = $out.d
  deps = gcc
  description = $name
rule link
  command = $nvcc -shared -cudart=static $in -ldl -o $out
  description = $name
# A new file in the old one's place: a running process may have that mapped.
rule place
  command = cp $in $out.partial && mv $out.partial $out
  description = $name
"""


def relative(path: str | Path) -> Path:
    """Return a path relative to the root, where ninja runs, so that it is equal in all clones."""
    return Path(path).relative_to(ROOT) if Path(path).is_relative_to(ROOT) else Path(path)


def escaped(path: Path) -> str:
    """Return a path as ninja's build statements require it."""
    return re.sub(r"([$ :])", r"$\1", str(relative(path)))


def quoted(words: list[str]) -> str:
    """Return the words of a command as a variable of ninja."""
    return shlex.join(words).replace("$", "$$")


def statements(package: NativePackage, output: Path, flags_of: dict[str, str]) -> list[str]:
    """Return ninja's statements that build ``output`` from the package's sources.

    ``flags_of`` gives the flags by the suffix of a source.
    """
    lines, objects = [], []
    for source in package.sources():
        made = FOLDER / package.name / f"{source.name}.o"
        objects.append(escaped(made))
        lines.append(f"build {objects[-1]}: compile {escaped(source)}")
        flags = flags_of[source.suffix]
        if source.name == "bindings.cpp":
            stamp_of = runpy.run_path(str(ROOT / STAMP))["stamp_of"]
            flags += f" -DBUILD_STAMP={stamp_of(ROOT, package.inner)}"
        lines.append(f"  flags = {flags}")
        lines.append(f"  name = {source.relative_to(ROOT)}")
    linked = escaped(FOLDER / package.name / output.name)
    lines += [f"build {linked}: link {' '.join(objects)}", f"  name = {package.name}: linked"]
    return [*lines, f"build {escaped(output)}: place {linked}", f"  name = {package.name}: built"]


def build(outputs: dict[NativePackage, Path], archs: str) -> None:
    """Write ``build.ninja`` for these packages and run it; ``archs`` are the default targets."""
    first = next(iter(outputs))
    nvcc, ninja = find_nvcc(first), find_ninja(first)
    flags = ["-O3", "-std=c++17", "-I.", "-Xcompiler=-fPIC,-fvisibility=hidden,-Wall"]
    flags_of = {
        ".cu": quoted([*flags, *arch_flags(nvcc, archs)]),
        ".cpp": quoted([*flags, *include_flags(first)]),
    }
    ccache = shutil.which("ccache")
    launcher = [] if ccache is None else [ccache]
    lines = [f"builddir = {escaped(FOLDER)}", f"nvcc = {quoted([nvcc])}"]
    lines += [f"launcher = {quoted(launcher)}", RULES]
    for package, output in outputs.items():
        lines += statements(package, output, flags_of)
    FOLDER.mkdir(parents=True, exist_ok=True)
    file = FOLDER / "build.ninja"
    file.write_text("\n".join(lines) + "\n")
    jobs = os.environ.get("MAX_JOBS") or str(os.cpu_count() or 1)
    targets = ", ".join(re.findall(r"code=(sm_\w+)", flags_of[".cu"]))
    for package in outputs:
        num_sources = len(package.sources())
        print(f"{package.name}: {num_sources} sources for {targets}, compiled if changed")
    sys.stdout.flush()
    # Without this setting ccache hashes the folder, and clones share no objects.
    variables = {"NINJA_STATUS": "[%f/%t, %e s] ", "CCACHE_NOHASHDIR": "1", **os.environ}
    command = [ninja, "-f", str(file), "-j", jobs]
    if subprocess.run(command, env=variables, cwd=ROOT, check=False).returncode != 0:
        raise BuildError(f"{file}: the build failed, see the compiler's messages above")


class BuildNative(build_ext):
    """``build_ext`` that passes all extensions to ninja; a missing tool ends it with one line."""

    def run(self) -> None:
        """Build every extension of the chosen packages directly in its final folder."""
        package_of = {package.extension: package for package in NATIVE_PACKAGES}
        outputs = {
            package_of[extension.name]: Path(self.get_ext_fullpath(extension.name)).resolve()
            for extension in self.extensions
        }
        if not self.inplace:
            library = Path(self.build_lib).resolve()
            outputs = {
                package: library / OVERLAY / output.relative_to(library)
                for package, output in outputs.items()
            }
            for place in outputs.values():
                place.parent.mkdir(parents=True, exist_ok=True)
        try:
            if outputs:
                build(outputs, archs_of_cards() if self.inplace else DEFAULT_ARCHS)
        except BuildError as error:
            if self.inplace:
                sys.exit(str(error))
            names = ", ".join(package.name for package in outputs)
            reason = str(error).removeprefix(f"{next(iter(outputs)).name}: ")
            print(f"not compiled: {names}: {reason}; {COST}", file=sys.stderr)

    def get_outputs(self) -> list[str]:
        """Return nothing, because the extensions are part of the output of `BuildOverlay`."""
        return []


class BuildOverlay(build_py):
    """``build_py`` that copies the project into the wheel's separate folder."""

    def run(self) -> None:
        library = Path(self.build_lib)
        shutil.rmtree(library / OVERLAY, ignore_errors=True)  # files of an older build
        for package in PACKAGES:
            for file in (ROOT / package).rglob("*"):
                if file.suffix in KEPT and file.name != "setup.py":
                    place = library / OVERLAY / file.relative_to(ROOT)
                    place.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(file, place)
        shutil.copy(ROOT / "scripts" / "installed" / "mosaic_overlay_path.py", library)
        (library / "mosaic.pth").write_text("import mosaic_overlay_path\n")

    def get_source_files(self) -> list[str]:
        """Return nothing in the places where setuptools looks for modules."""
        return []


def main(package_name: str | None) -> None:
    """Run setuptools for all native packages from the root (None), or for one from its folder."""
    packages = [package for package in NATIVE_PACKAGES if package_name in (None, package.name)]
    package_dir = {"": "."} if package_name is None else {packages[0].import_name: "."}
    os.chdir(ROOT if package_name is None else ROOT / packages[0].folder)
    FOLDER.mkdir(parents=True, exist_ok=True)
    logging.disable(logging.INFO)  # setuptools logs the name of every file that it copies
    setup(
        packages=[],
        py_modules=["mosaic_overlay_path"] if package_name is None else [],
        options={"egg_info": {"egg_base": str(FOLDER)}},  # a folder where Python does not find it
        package_dir=package_dir,
        ext_modules=[
            Extension(package.extension, [str(source) for source in package.sources()])
            for package in packages
            if package.is_enabled
        ],
        cmdclass={"build_ext": BuildNative, "build_py": BuildOverlay},
    )


if __name__ == "__main__":
    # The setup.py of a native package runs this file with NATIVE_PACKAGE set to its name.
    main(globals().get("NATIVE_PACKAGE"))
