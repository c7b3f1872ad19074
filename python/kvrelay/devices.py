"""What there is to compute on, and why the rest is not usable."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import overload

from kvrelay import _core


@dataclass(frozen=True)
class CpuDevice:
    """The machine's processor: ``device="cpu"``.

    ``cores`` are those this process may use. ``vector`` is the widest kind of vector instructions that
    the kernels use on them, ``"AVX2"`` or ``"AVX-512"``; ``None`` where they use neither.
    """

    device: str
    cores: int
    vector: str | None

    def __str__(self) -> str:
        return f"{self.cores} core{'s' * (self.cores != 1)}, {self.vector or 'no vector instructions beyond the baseline'}"


@dataclass(frozen=True)
class CudaDevice:
    """A device that the CUDA driver lists; :attr:`Devices.cuda_available` says whether kvrelay can use it.

    ``memory`` is in bytes. ``driver_version`` is the newest CUDA that the driver runs.
    """

    device: str
    name: str
    memory: int
    compute_capability: tuple[int, int]
    driver_version: tuple[int, int]

    def __str__(self) -> str:
        (major, minor), (cuda, point) = self.compute_capability, self.driver_version
        return f"{self.name}, {self.memory / 2**30:.1f} GiB, compute capability {major}.{minor}, driver for CUDA {cuda}.{point}"


@dataclass(frozen=True, repr=False)
class Devices(Sequence["CpuDevice | CudaDevice"]):
    """What :func:`devices` found: a sequence of the devices that an engine can use.

    ``cuda`` are the devices that the CUDA driver lists, usable or not. ``why_no_cuda`` says why none of
    them is, and is ``None`` exactly when :attr:`cuda_available`.
    """

    cpu: CpuDevice
    cuda: tuple[CudaDevice, ...]
    why_no_cuda: str | None

    @property
    def cuda_available(self) -> bool:
        """Whether an engine can run on a CUDA device."""
        return self.why_no_cuda is None

    def _usable(self) -> tuple[CpuDevice | CudaDevice, ...]:
        return (self.cpu, *self.cuda) if self.cuda_available else (self.cpu,)

    def __len__(self) -> int:
        return len(self._usable())

    def __iter__(self) -> Iterator[CpuDevice | CudaDevice]:
        return iter(self._usable())

    @overload
    def __getitem__(self, index: int) -> CpuDevice | CudaDevice: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[CpuDevice | CudaDevice, ...]: ...

    def __getitem__(self, index: int | slice) -> CpuDevice | CudaDevice | tuple[CpuDevice | CudaDevice, ...]:
        return self._usable()[index]

    def _rows(self) -> list[tuple[str, str]]:
        rows = [(device.device, str(device)) for device in self]
        return rows if self.cuda_available else [*rows, ("cuda", f"not usable: {self.why_no_cuda}")]

    def __repr__(self) -> str:
        return "; ".join(self.lines())

    def lines(self) -> list[str]:
        """One line a device, and one for what is not usable."""
        return [f"{device}: {text}" for device, text in self._rows()]

    def _repr_html_(self) -> str:
        cells = (f"<tr><th>{device}</th><td>{html.escape(text)}</td></tr>" for device, text in self._rows())
        return f"<table>{''.join(cells)}</table>"


def devices() -> Devices:
    """What is usable here, and why the rest is not.

    Looks for a CUDA driver and initialises it if there is one; after that, as always with CUDA, a forked
    child of this process cannot use CUDA. Without a driver nothing is initialised.

    >>> found = devices()
    >>> found.cpu.cores >= 1
    True
    >>> found.cuda_available == (found.why_no_cuda is None)
    True
    """
    cores, vector = _core.cpu()
    listed, why = _core.cuda()
    cuda = tuple(CudaDevice(f"cuda:{ordinal}", *device) for ordinal, device in enumerate(listed))
    return Devices(CpuDevice("cpu", cores, vector), cuda, why)


def cuda_available() -> bool:
    """Whether an engine can run on a CUDA device here; :func:`devices` says why not."""
    return devices().cuda_available
