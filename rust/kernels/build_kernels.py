"""Compiles the CUDA kernels: every `.cu` of a folder for every target, into one compressed fatbin.

    python build_kernels.py [--sources FOLDER] [--out FOLDER] [--name NAME] [--ptx-only] [--jobs N]

writes `NAME.fatbin` (a cubin a target, and PTX for what is newer), `NAME.ptx`, and `NAME.json`, the
manifest: of each kernel its source, parameters, limits, and what each target's compiler says of it. Needs
no GPU and no CUDA on the machine: the compiler comes from the package registry, pinned, into
`FOLDER/toolkit`. Fails on a spill, a stack frame, PTX that a driver for CUDA 13.0 would refuse, or a
kernel's name that is there twice.

Incremental by content: a step runs again only if its command or a file that it read has changed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent

# A newer compiler emits PTX that the drivers of CUDA 13.0 refuse.
TOOLKIT = {
    "nvidia-cuda-nvcc": "13.0.88",
    "nvidia-nvvm": "13.0.88",
    "nvidia-cuda-crt": "13.0.88",
    "nvidia-cuda-runtime": "13.0.96",
    "nvidia-cuda-cccl": "13.0.85",
}
NEWEST_PTX = (9, 0)
# Ampere (A100, A10), Ada, Hopper, Blackwell (B200, RTX 50). What is newer compiles the PTX.
TARGETS = (80, 86, 89, 90, 100, 120)
PTX_TARGET = 80
NVCC = ["-O3", "-std=c++17", "-Werror", "all-warnings", "--frandom-seed=kvrelay"]


class BuildError(Exception):
    """What is wrong with the kernels or the machine, in words for whoever builds."""


# --- steps that run again only when they must -----------------------------------------------------


def digest_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@dataclass(frozen=True)
class Step:
    """A command that makes `output` from `inputs`, and from what its depfile names, if it writes one.

    `output`.log keeps what it said. Files outside `within` belong to a toolkit, which is pinned.
    """

    command: list[str]
    output: Path
    inputs: tuple[Path, ...]
    within: tuple[Path, ...]
    depfile: Path | None = None

    def key(self) -> str | None:
        """What the output depends on; `None` where that cannot be known yet."""
        files = set(self.inputs)
        if self.depfile is not None:
            if not self.depfile.exists():
                return None
            names = self.depfile.read_text().split(":", 1)[1].replace("\\\n", " ")
            files |= {Path(name).resolve() for name in shlex.split(names)}
        ours = sorted(
            file for file in files if file in self.inputs or any(map(file.is_relative_to, self.within))
        )
        if not all(file.exists() for file in ours):
            return None
        contents = [f"{file} {digest_of(file)}" for file in ours]
        return hashlib.sha256("\n".join([*self.command, *contents]).encode()).hexdigest()

    def run(self) -> bool:
        """Whether anything had to be done."""
        log, key_file = (self.output.with_name(self.output.name + end) for end in (".log", ".key"))
        before = self.key()
        if before and self.output.exists() and key_file.exists() and key_file.read_text() == before:
            return False
        key_file.unlink(missing_ok=True)
        self.output.parent.mkdir(parents=True, exist_ok=True)
        done = subprocess.run(self.command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        log.write_text(done.stdout)
        if done.returncode:
            self.output.unlink(missing_ok=True)
            said = done.stdout.strip() or f"it ended with status {done.returncode}"
            raise BuildError(f"{shlex.join(self.command)}\n{said}")
        after = self.key()
        if after is None:
            raise BuildError(f"{shlex.join(self.command)}\nwrote no list of the files that it read")
        key_file.write_text(after)
        return True

    def log(self) -> str:
        """What the command said when it last ran."""
        return self.output.with_name(self.output.name + ".log").read_text()


def run_all(steps: Iterable[Step], jobs: int) -> int:
    """Runs independent steps; how many had something to do."""
    with ThreadPoolExecutor(jobs) as pool:
        return sum(pool.map(Step.run, steps))


# --- the compiler ---------------------------------------------------------------------------------


def toolkit(folder: Path) -> Path:
    """The folder of the pinned CUDA compiler, installed if it is not there."""
    pins = [f"{name}=={version}" for name, version in TOOLKIT.items()]
    stamp, root = folder / "pins", folder / "nvidia" / "cu13"
    if not (stamp.exists() and stamp.read_text() == "\n".join(pins)):
        shutil.rmtree(folder, ignore_errors=True)
        # pip, since unzipping a wheel by hand loses which files can be run.
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        pip += ["--root-user-action=ignore", "--no-deps", "--only-binary=:all:", "--target", str(folder)]
        done = subprocess.run([*pip, *pins])
        if done.returncode:
            raise BuildError(f"pip could not install the CUDA compiler ({', '.join(pins)})")
        stamp.write_text("\n".join(pins))
    return root


def compile_step(nvcc: Path, source: Path, output: Path, flags: list[str]) -> Step:
    depfile = output.with_name(output.name + ".d")
    command = [str(nvcc), *NVCC, *flags, "-MD", "-MF", str(depfile), "-o", str(output), str(source)]
    return Step(command, output, (source,), (source.parent, HERE.parent), depfile)


# --- PTX ------------------------------------------------------------------------------------------


def merged_ptx(modules: dict[str, str]) -> str:
    """One PTX module of several: the first one's header, and everybody's declarations, once."""
    header, bodies, declared = None, [], set()
    for name, text in modules.items():
        found = re.search(r"\.version (\d+)\.(\d+)\n\.target \w+\n\.address_size 64\n", text)
        if not found:
            raise BuildError(f"the PTX of {name} does not begin with a version, a target and an address size")
        version = tuple(map(int, found.groups()))
        if version > NEWEST_PTX:
            newest = ".".join(map(str, NEWEST_PTX))
            raise BuildError(f"the PTX of {name} has version {found[1]}.{found[2]}, newer than {newest}")
        if header is not None and header != found[0]:
            raise BuildError(
                f"the PTX of {name} has another header than the PTX before it: {found[0]!r}, {header!r}"
            )
        header, lines = found[0], []
        for line in text[found.end() :].splitlines():
            # What several files declare in the same words is declared once; entries are never dropped.
            if line.startswith(".extern") and line.endswith(";"):
                if line in declared:
                    continue
                declared.add(line)
            lines.append(line)
        bodies.append("\n".join(lines))
    return (header or "") + "\n".join(bodies) + "\n"


PTX_BYTES = {"8": 1, "16": 2, "32": 4, "64": 8}
PARAMETER = re.compile(
    r"\.param\s+(?:\.align\s+(?P<align>\d+)\s+)?\.[a-z]+(?P<bits>8|16|32|64)\s+(?:\.ptr\s[^,]*?)?[\w$]+(?:\[(?P<count>\d+)\])?"
)


def entries_of(ptx: str) -> dict[str, dict]:
    """Parameters (offset and size in bytes) and the most threads of each kernel in PTX."""
    kernels: dict[str, dict] = {}
    for found in re.finditer(r"\.entry\s+([\w$]+)\s*(?:\(([^)]*)\))?([^{]*)\{", ptx):
        name, parameters, directives = found[1], found[2] or "", found[3]
        if name in kernels:
            raise BuildError(f"two kernels have the name {name}")
        listed, offset = [], 0
        for one in PARAMETER.finditer(parameters):
            unit = PTX_BYTES[one["bits"]]
            size, align = unit * int(one["count"] or 1), int(one["align"] or unit)
            offset = (offset + align - 1) // align * align
            listed.append({"offset": offset, "size": size})
            offset += size
        threads = re.search(r"\.maxntid\s+(\d+)(?:\s*,\s*(\d+))?(?:\s*,\s*(\d+))?", directives)
        most = None
        if threads:
            most = int(threads[1]) * int(threads[2] or 1) * int(threads[3] or 1)
        kernels[name] = {"parameters": listed, "max_threads": most}
    return kernels


# --- what ptxas says ------------------------------------------------------------------------------

PTXAS = re.compile(
    r"Compiling entry function '(?P<name>[^']+)' for 'sm_\w+'.*?"
    r"(?P<stack>\d+) bytes stack frame, (?P<spill_stores>\d+) bytes spill stores, (?P<spill_loads>\d+) bytes spill loads"
    r".*?Used (?P<registers>\d+) registers(?P<rest>[^\n]*)",
    re.DOTALL,
)


def usage_of(log: str) -> dict[str, dict[str, int]]:
    """Registers, static shared memory, stack and spills of each kernel, from the log of `ptxas -v`."""
    usage = {}
    for found in PTXAS.finditer(log):
        shared = re.search(r"(\d+) bytes smem", found["rest"])
        numbers = {key: int(found[key]) for key in ("registers", "stack", "spill_stores", "spill_loads")}
        usage[found["name"]] = numbers | {"shared": int(shared[1]) if shared else 0}
    return usage


def refuse_spills(kernels: dict[str, dict]) -> None:
    """Every kernel keeps all it has in registers, on every target."""
    wrong = []
    for name, kernel in kernels.items():
        for target, used in kernel["targets"].items():
            for what in ("stack", "spill_stores", "spill_loads"):
                if used[what]:
                    wrong.append(
                        f"{name} ({kernel['source']}) on {target}: {used[what]} bytes of {what.replace('_', ' ')}, not 0"
                    )
    if wrong:
        raise BuildError("kernels that do not fit into registers:\n  " + "\n  ".join(wrong))


# --- all of it ------------------------------------------------------------------------------------


def fnv1a64(data: bytes) -> str:
    """The digest by which whoever holds a fatbin tells which manifest is its own (FNV-1a, 64 bits)."""
    value = 0xCBF29CE484222325
    for byte in data:
        value = (value ^ byte) * 0x100000001B3 & 0xFFFFFFFFFFFFFFFF
    return f"{value:016x}"


def write_if_changed(path: Path, text: str) -> None:
    if not (path.exists() and path.read_text() == text):
        path.write_text(text)


@dataclass(frozen=True)
class Build:
    """One set of kernels, from `sources`, called `name`, put into `out`."""

    sources: list[Path]
    out: Path
    name: str
    root: Path
    jobs: int

    def tool(self, name: str) -> Path:
        return self.root / "bin" / name

    def part(self, source: Path, end: str) -> Path:
        return self.out / "parts" / self.name / f"{source.stem}.{end}"

    def ptx(self) -> tuple[Path, dict[str, dict], dict[str, str]]:
        """Compiles the PTX, and has it checked: its path, its kernels, their sources."""
        flags = ["-ptx", f"-arch=compute_{PTX_TARGET}"]
        steps = [compile_step(self.tool("nvcc"), s, self.part(s, "ptx"), flags) for s in self.sources]
        run_all(steps, self.jobs)
        texts = {step.inputs[0].name: step.output.read_text() for step in steps}
        source_of = {kernel: name for name, text in texts.items() for kernel in entries_of(text)}
        ptx = self.out / f"{self.name}.ptx"
        write_if_changed(ptx, merged_ptx(texts))
        return ptx, entries_of(ptx.read_text()), source_of

    def assembled(self, ptx: Path) -> dict[str, dict[str, int]]:
        """What the target of the PTX makes of the merged PTX."""
        output = self.out / "parts" / self.name / "merged.cubin"
        command = [str(self.tool("ptxas")), "-v", f"-arch=sm_{PTX_TARGET}", "-o", str(output), str(ptx)]
        step = Step(command, output, (ptx,), ())
        step.run()
        return usage_of(step.log())

    def cubins(self, ptx: Path) -> tuple[list[Path], dict[str, dict[str, dict[str, int]]]]:
        """Assembles the merged PTX for every target: its cubin, and by target what it makes of each kernel.

        Files are merged as PTX, since cubins that are to be linked (`-rdc`) cost many more registers.
        """
        steps = []
        for target in TARGETS:
            output = self.out / "parts" / self.name / f"sm_{target}.cubin"
            command = [
                str(self.tool("ptxas")),
                "-v",
                "-O3",
                f"-arch=sm_{target}",
                "-o",
                str(output),
                str(ptx),
            ]
            steps.append(Step(command, output, (ptx,), ()))
        run_all(steps, self.jobs)
        usage = {f"sm_{target}": usage_of(step.log()) for target, step in zip(TARGETS, steps, strict=True)}
        return [step.output for step in steps], usage

    def fatbin(self, ptx: Path, cubins: list[Path]) -> Path:
        output = self.out / f"{self.name}.fatbin"
        images = [
            f"--image3=kind=elf,sm={target},file={cubin}"
            for target, cubin in zip(TARGETS, cubins, strict=True)
        ]
        images.append(f"--image3=kind=ptx,sm={PTX_TARGET},file={ptx}")
        command = [str(self.tool("fatbinary")), f"--create={output}", "-64", "-compress-all", *images]
        Step(command, output, (ptx, *cubins), ()).run()
        return output

    def manifest(self, ptx_only: bool) -> dict:
        """Builds what there is to build, and describes it."""
        ptx, kernels, source_of = self.ptx()
        merged = self.assembled(ptx)
        for name, kernel in kernels.items():
            kernel |= {"source": source_of[name], "static_shared": merged[name]["shared"], "targets": {}}
        digest, size = None, 0
        if not ptx_only:
            cubins, usage = self.cubins(ptx)
            for target, used in usage.items():
                for name, kernel in kernels.items():
                    kernel["targets"][target] = {k: v for k, v in used[name].items() if k != "shared"}
            refuse_spills(kernels)
            data = self.fatbin(ptx, cubins).read_bytes()
            digest, size = fnv1a64(data), len(data)
        return {
            "compiler": TOOLKIT["nvidia-cuda-nvcc"],
            "ptx_version": ".".join(map(str, NEWEST_PTX)),
            "fatbin": {"bytes": size, "fnv1a64": digest},
            "kernels": [{"name": name} | kernels[name] for name in sorted(kernels)],
        }


def main() -> None:
    parser = argparse.ArgumentParser(description="Compile the CUDA kernels.")
    parser.add_argument("--sources", type=Path, default=HERE / "cuda", help="the folder of the .cu files")
    parser.add_argument("--out", type=Path, default=HERE.parents[1] / "target" / "cuda")
    parser.add_argument("--name", default="kernels", help="of the files that are written")
    parser.add_argument("--ptx-only", action="store_true", help="no fatbin: for kernels that no GPU will run")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    given = parser.parse_args()
    sources = sorted(given.sources.resolve().glob("*.cu"))
    if not sources:
        raise BuildError(f"{given.sources} holds no .cu file")
    out = given.out.resolve()
    build = Build(sources, out, given.name, toolkit(out / "toolkit"), given.jobs)
    manifest = build.manifest(given.ptx_only)
    write_if_changed(out / f"{given.name}.json", json.dumps(manifest, indent=1) + "\n")
    print(
        f"{len(manifest['kernels'])} kernels, {manifest['fatbin']['bytes']} bytes of fatbin: {out / given.name}.*"
    )


if __name__ == "__main__":
    try:
        main()
    except BuildError as error:
        sys.exit(f"{Path(__file__).name}: {error}")
