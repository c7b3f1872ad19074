"""Builds the emulated CUDA: stand-ins for libcuda and libcublas, and the kernels as libraries of theirs.

    python build_emulator.py [--out FOLDER] [--sources FOLDER --manifest FILE --name NAME] [--jobs N]

`FOLDER/emulated` gets libcuda.so.1 and libcublas.so.13, and libcuda.so and libcublas.so that lead to them,
since some look for those first; and in `kernels/` one library for every `.cu` that the manifest of
`build_kernels.py` lists. Another `--name` gives the folder of the kernels another name. Needs g++ alone;
incremental by content.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "kernels"))

from build_kernels import BuildError, Step, number_of_jobs, run_all, run_program, write_if_changed  # noqa: E402

CPP = HERE / "cpp"
BUILD_KERNELS = "build_kernels.py"
# Baseline instructions where the machine has no more; nothing is fused that the source does not fuse.
WIDE = (
    ["-march=x86-64-v3"] if {"avx2", "fma", "f16c"} <= set(Path("/proc/cpuinfo").read_text().split()) else []
)
GXX = ["g++", "-std=c++17", "-O2", "-g1", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", *WIDE]
WARNINGS = ["-Wall", "-Wextra", "-Werror"]
# Kernels keep their shared memory in thread-local variables, which this makes cheap to reach, and unshared
# between libraries. What CUDA's compilers allow, such as unknown pragmas, is no mistake here.
KERNELS = [
    "-mtls-dialect=gnu2",
    "-fno-gnu-unique",
    "-fno-strict-aliasing",
    "-Wall",
    "-Werror",
    "-Wno-unknown-pragmas",
    # What a GPU refuses, or does to the memory beside: `checks.cpp` makes errors of it.
    "-fsanitize=alignment,bounds",
    "-fno-sanitize-recover=all",
]
LINK = ["g++", "-shared", "-Wl,--no-undefined"]


def compile_step(source: Path, output: Path, flags: list[str]) -> Step:
    depfile = output.with_name(output.name + ".d")
    command = [*GXX, *flags, "-MD", "-MF", str(depfile), "-c", "-o", str(output), str(source)]
    return Step(command, output, (source,), (source.parent, HERE.parent), depfile)


def link_step(output: Path, inputs: list[Path], flags: list[str]) -> Step:
    command = [*LINK, f"-Wl,-soname,{output.name}", *flags, *map(str, inputs), "-o", str(output)]
    return Step(command, output, tuple(inputs), ())


def leading_to(library: Path, plain: str, jobs: int) -> None:
    """An empty library of the plain name, whose symbols are those of the one that it needs."""
    empty = library.parent / "parts" / "empty.c"
    empty.parent.mkdir(parents=True, exist_ok=True)
    write_if_changed(empty, "")
    flags = ["-Wl,--no-as-needed", "-Wl,-rpath,$ORIGIN", "-x", "c", str(empty), "-x", "none"]
    run_all([link_step(library.with_name(plain), [library], flags)], jobs)


def stand_ins(out: Path, jobs: int) -> Path:
    """The driver and cuBLAS; the driver's path."""
    parts = out / "parts"
    driver = [
        compile_step(s, parts / f"{s.stem}.o", WARNINGS) for s in sorted((CPP / "driver").glob("*.cpp"))
    ]
    cublas = compile_step(
        CPP / "cublas" / "gemm.cpp",
        parts / "gemm.o",
        [*WARNINGS, "-O3", "-fassociative-math", "-fno-signed-zeros", "-fno-trapping-math"],
    )
    run_all([*driver, cublas], jobs)
    exports = CPP / "driver" / "exports.map"
    libcuda, libcublas = out / "libcuda.so.1", out / "libcublas.so.13"
    flags = [f"-Wl,--version-script={exports}", "-pthread", "-ldl"]
    link = link_step(libcuda, [step.output for step in driver], flags)
    Step(link.command, link.output, (*link.inputs, exports), ()).run()
    run_all([link_step(libcublas, [cublas.output, libcuda], ["-Wl,-rpath,$ORIGIN"])], jobs)
    leading_to(libcuda, "libcuda.so", jobs)
    leading_to(libcublas, "libcublas.so", jobs)
    return libcuda


def registration(source: Path, kernels: list[dict], fatbin: str | None) -> str:
    """The source of a library: the kernels, and what nvcc made of them."""
    lines = [f'#include "{source}"', "", "namespace {", "", "using namespace kvrelay_emulated;", ""]
    rows = []
    for kernel in kernels:
        name = kernel["name"]
        sizes = [str(parameter["size"]) for parameter in kernel["parameters"]]
        registers = [f"{{{target[3:]}, {used['registers']}}}" for target, used in kernel["targets"].items()]
        lines.append(f"const uint32_t {name}_sizes[] = {{{', '.join([*sizes, '0'])}}};")
        lines.append(f"const TargetRegisters {name}_registers[] = {{{', '.join([*registers, '{0, 0}'])}}};")
        caller = f"Caller<&::{name}>"
        rows.append(
            f'    {{"{name}", &{caller}::call, {caller}::sizes, {caller}::count, {name}_sizes, {len(sizes)}, '
            f"{kernel['max_threads'] or 0}, {kernel['static_shared']}, {name}_registers, {len(registers)}}},"
        )
    lines += ["", "const Kernel KERNELS[] = {", *rows, "};", ""]
    lines += [
        f'const Library LIBRARY = {{"{source.name}", 0x{fatbin or "0"}u, KERNELS, {len(kernels)}}};',
        "",
        "__attribute__((constructor)) void tell_the_emulator() { register_library(&LIBRARY); }",
        "",
        "}  // namespace",
    ]
    return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class Manifest:
    """What `build_kernels.py` wrote of the kernels, as far as the emulator needs it."""

    kernels: list[dict]
    # Of the fatbin, where there is one.
    digest: str | None

    @staticmethod
    def read(path: Path) -> Manifest:
        again = f"run {BUILD_KERNELS} again"
        try:
            described = json.loads(path.read_bytes())
            manifest = Manifest(described["kernels"], described["fatbin"]["fnv1a64"])
            for kernel in manifest.kernels:
                registration(Path(kernel["source"]), [kernel], manifest.digest)
        except FileNotFoundError:
            raise BuildError(f"{path}, the manifest of the kernels, is not there: {again}") from None
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise BuildError(f"{path} is no manifest of kernels ({error!r}): {again}") from error
        return manifest


def kernel_libraries(sources: Path, manifest: Manifest, folder: Path, libcuda: Path, jobs: int) -> int:
    """One library for every source that the manifest lists; how many kernels they hold."""
    by_source: dict[str, list[dict]] = {}
    for kernel in manifest.kernels:
        by_source.setdefault(kernel["source"], []).append(kernel)
    parts = folder / "parts"
    parts.mkdir(parents=True, exist_ok=True)
    guard, checks = (
        compile_step(CPP / "kernel" / f"{name}.cpp", folder.parent / "parts" / f"{name}.o", WARNINGS)
        for name in ("guard", "checks")
    )
    run_all([guard, checks], jobs)
    compiles, links = [], []
    for name, kernels in by_source.items():
        stem = Path(name).stem
        generated = parts / f"{stem}.cpp"
        write_if_changed(generated, registration(sources / name, kernels, manifest.digest))
        compiles.append(
            compile_step(generated, parts / f"{stem}.o", [*KERNELS, "-include", str(CPP / "emulate.h")])
        )
        # Thread-local memory is laid out in the order of linking.
        inputs = [guard.output, compiles[-1].output, checks.output, guard.output, libcuda]
        links.append(link_step(folder / f"{stem}.so", inputs, []))
    run_all(compiles, jobs)
    run_all(links, jobs)
    for stale in set(folder.glob("*.so")) - {link.output for link in links}:
        stale.unlink()
    return len(manifest.kernels)


def main() -> None:
    target = HERE.parents[1] / "target" / "cuda"
    parser = argparse.ArgumentParser(description="Build the emulated CUDA.")
    parser.add_argument("--out", type=Path, default=target)
    parser.add_argument(
        "--sources", type=Path, default=HERE.parent / "kernels" / "cuda", help="the folder of the .cu files"
    )
    parser.add_argument(
        "--manifest", type=Path, help="what build_kernels.py wrote of them (OUT/kernels.json)"
    )
    parser.add_argument("--name", default="kernels", help="of the folder of the kernels' libraries")
    parser.add_argument("--jobs", type=number_of_jobs, default=len(os.sched_getaffinity(0)))
    given = parser.parse_args()
    out = given.out.resolve() / "emulated"
    manifest = Manifest.read((given.manifest or given.out / "kernels.json").resolve())
    libcuda = stand_ins(out, given.jobs)
    number = kernel_libraries(given.sources.resolve(), manifest, out / given.name, libcuda, given.jobs)
    print(f"{number} emulated kernels: {out / given.name}")


if __name__ == "__main__":
    run_program(main)
