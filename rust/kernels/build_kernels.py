"""Compiles the CUDA kernels: every `.cu` of a folder for every target, into one compressed fatbin.

    python build_kernels.py [--sources FOLDER] [--out FOLDER] [--name NAME] [--ptx-only] [--jobs N]

writes `NAME.fatbin` (a cubin a target, and PTX for what is newer), `NAME.ptx`, and `NAME.json`, the
manifest: of each kernel its source, parameters, limits, and what each target's compiler says of it. Needs
no GPU and no CUDA on the machine: the compiler comes from the package registry, pinned, into
`FOLDER/toolkit`. Fails on a spill, a stack frame, PTX that a driver for CUDA 13.0 would refuse, or a
kernel's name that is there twice.

Incremental by content: a step runs again only if its command, a file that it read, or what it left behind
has changed. What is written gets its name only when it is complete.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
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


def write_whole(path: Path, data: bytes) -> None:
    """Writes a file that whoever looks finds complete, or as it was before."""
    new = path.with_name(path.name + ".new")
    new.write_bytes(data)
    new.replace(path)


def write_if_changed(path: Path, text: str) -> None:
    data = text.encode()
    if not (path.exists() and path.read_bytes() == data):
        write_whole(path, data)


@dataclass(frozen=True)
class Step:
    """A command that makes `output` from `inputs`, and from what its depfile names, if it writes one.

    `output`.log keeps what it said, `output`.key what both were made from. Files outside `within` belong to
    a toolkit, which is pinned.
    """

    command: list[str]
    output: Path
    inputs: tuple[Path, ...]
    within: tuple[Path, ...]
    depfile: Path | None = None

    def beside(self, end: str) -> Path:
        return self.output.with_name(self.output.name + end)

    def key(self) -> str | None:
        """What the output depends on; `None` where that cannot be known yet."""
        files = set(self.inputs)
        if self.depfile is not None:
            read = files_read(self.depfile)
            if not read:
                return None
            files |= read
        ours = sorted(
            file for file in files if file in self.inputs or any(map(file.is_relative_to, self.within))
        )
        if not all(file.exists() for file in ours):
            return None
        contents = [f"{file} {digest_of(file)}" for file in ours]
        return hashlib.sha256("\n".join([*self.command, *contents]).encode()).hexdigest()

    def done(self) -> bytes | None:
        """What the key file holds of a step that is done; `None` where something of it is not there."""
        key = self.key()
        made = [self.output, self.beside(".log"), *([self.depfile] if self.depfile else [])]
        if key is None or not all(file.exists() for file in made):
            return None
        return "\n".join([key, *map(digest_of, made)]).encode()

    def run(self) -> bool:
        """Whether anything had to be done."""
        key_file, new = self.beside(".key"), self.beside(".new")
        done = self.done()
        if done is not None and key_file.exists() and key_file.read_bytes() == done:
            return False
        key_file.unlink(missing_ok=True)
        self.output.parent.mkdir(parents=True, exist_ok=True)
        try:
            self.say_and_make(new)
            new.replace(self.output)
        finally:
            new.unlink(missing_ok=True)
        done = self.done()
        if done is None:
            raise BuildError(f"{shlex.join(self.command)}\nwrote no list of the files that it read")
        write_whole(key_file, done)
        return True

    def say_and_make(self, new: Path) -> None:
        """Runs the command, with `new` in the place of the output."""
        name = str(self.output)
        command = [
            part[: -len(name)] + str(new) if part == name or part.endswith(f"={name}") else part
            for part in self.command
        ]
        try:
            ran = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        except OSError as error:
            raise BuildError(f"{command[0]} cannot be run: {error.strerror}") from error
        # Compilers quote sources, which can be in any encoding.
        said = ran.stdout.decode(errors="replace")
        self.beside(".log").write_text(said, encoding="utf-8")
        if ran.returncode:
            self.output.unlink(missing_ok=True)
            said = said.strip() or f"it ended with status {ran.returncode}"
            raise BuildError(f"{shlex.join(self.command)}\n{said}")
        if not new.exists():
            raise BuildError(f"{shlex.join(self.command)}\nmade no {self.output.name}")

    def log(self) -> str:
        """What the command said when it last ran."""
        return self.beside(".log").read_text(encoding="utf-8")


def files_read(depfile: Path) -> set[Path]:
    """The files that a compiler's list names; none where the list is missing or damaged."""
    try:
        names = re.split(r":\s", depfile.read_text(), maxsplit=1)[1:]
        return {Path(name).resolve() for name in shlex.split(" ".join(names).replace("\\\n", " "))}
    except (OSError, ValueError):
        return set()


def run_all(steps: Iterable[Step], jobs: int) -> int:
    """Runs independent steps; how many had something to do."""
    with ThreadPoolExecutor(jobs) as pool:
        return sum(pool.map(Step.run, steps))


# --- the compiler ---------------------------------------------------------------------------------


def toolkit(folder: Path) -> Path:
    """The folder of the pinned CUDA compiler, installed if it is not there.

    A folder that is not this function's own is refused, and a compiler that works stays until another one
    can take its place.
    """
    pins = [f"{name}=={version}" for name, version in TOOLKIT.items()]
    stamp, root = folder / "pins", Path("nvidia", "cu13")
    whole = (folder / root / "bin" / "nvcc").exists()
    if whole and stamp.exists() and stamp.read_bytes() == "\n".join(pins).encode():
        return folder / root
    if folder.exists() and not stamp.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise BuildError(f"{folder} is to hold the CUDA compiler, and holds something else: move it away")
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Beside the folder, so that it can be renamed into it.
    with tempfile.TemporaryDirectory(prefix=f"{folder.name}-", dir=folder.parent) as temporary:
        new, old = Path(temporary, "new"), Path(temporary, "old")
        # pip, since unzipping a wheel by hand loses which files can be run.
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        pip += ["--root-user-action=ignore", "--no-deps", "--only-binary=:all:", "--target", str(new)]
        done = subprocess.run([*pip, *pins])
        if done.returncode:
            raise BuildError(f"pip could not install the CUDA compiler ({', '.join(pins)})")
        (new / "pins").write_text("\n".join(pins))
        if folder.exists():
            folder.rename(old)
        new.rename(folder)
    return folder / root


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


def number_of_jobs(text: str) -> int:
    """How many steps run at once, as an option's value."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, found {text!r}")
    return int(text)


def run_program(main: Callable[[], None]) -> None:
    """Runs a `main`; what goes wrong is said in words, and not as a traceback."""
    name = Path(sys.argv[0]).name
    try:
        main()
    except (BuildError, OSError) as error:
        sys.exit(f"{name}: {error}")
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        sys.exit(130)


def main() -> None:
    parser = argparse.ArgumentParser(description="Compile the CUDA kernels.")
    parser.add_argument("--sources", type=Path, default=HERE / "cuda", help="the folder of the .cu files")
    parser.add_argument("--out", type=Path, default=HERE.parents[1] / "target" / "cuda")
    parser.add_argument("--name", default="kernels", help="of the files that are written")
    parser.add_argument("--ptx-only", action="store_true", help="no fatbin: for kernels that no GPU will run")
    parser.add_argument("--jobs", type=number_of_jobs, default=len(os.sched_getaffinity(0)))
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
    run_program(main)
