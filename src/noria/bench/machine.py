"""What the machine can do, measured just before and just after a benchmark: `MachineWatch`.

Machines change under one's hands: clocks, neighbours, where a virtual machine's cores are. A figure means something
beside the state it was measured in, and two figures can be compared when their states are alike. The measurements are
native code (csrc/machine.h); where that was not built or cannot run, they are null.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from pathlib import Path

import msgspec

from noria.ops.native import num_cores, why_unavailable

LEAST_BUFFER_BYTES, MOST_BUFFER_BYTES = 2**28, 2**30
"""What is read to measure the memory: eight times the last cache, within these. A cache may keep its share of it."""


class MachineState(msgspec.Struct, frozen=True, kw_only=True):
    """One measurement; None is what could not be measured. TFLOP/s count a multiplication and an addition as two."""

    read_gb_s: float | None = None
    """All threads reading memory, in 10^9 bytes per second."""
    read_buffer_mib: int | None = None
    """How much memory they read for that."""
    round_trip_ns: float | None = None
    """A cache line from the first core to the last and back."""
    bfloat16_tflops: float | None = None
    """The executor's own micro kernel, on all threads."""
    bfloat16_register_tflops: float | None = None
    """The bare instruction, dpbf16: no kernel of AVX-512 can be faster."""
    float32_tflops: float | None = None
    float32_register_tflops: float | None = None

    def peak_tflops(self, dtype: str) -> float | None:
        """The best that was seen, of kernel and bare instruction; `dtype` is "bfloat16" or "float32"."""
        if dtype == "bfloat16":
            return _greatest(self.bfloat16_tflops, self.bfloat16_register_tflops)
        return _greatest(self.float32_tflops, self.float32_register_tflops)


class MachineWatch:
    """Measures when it is made, and again when it is asked for its `report`.

    `threads` None means the cores that this process may use.
    """

    def __init__(self, threads: int | None = None, measure: Callable[[int], MachineState] | None = None) -> None:
        self.threads = threads or num_cores()
        self._measure = measure or measure_machine
        self.before = self._measure(self.threads)
        self.after: MachineState | None = None

    def finish(self) -> None:
        """Measures again, once: call it when what is to be measured has ended."""
        if self.after is None:
            self.after = self._measure(self.threads)

    @property
    def read_gb_s(self) -> float | None:
        """The greater of before and after: a floor should be one in whichever state the machine was."""
        return _greatest(*(state.read_gb_s for state in self._states()))

    def peak_tflops(self, dtype: str) -> float | None:
        return _greatest(*(state.peak_tflops(dtype) for state in self._states()))

    def report(self) -> dict[str, object]:
        """For a benchmark's JSON line."""
        self.finish()
        return {
            "cpu": cpu_name(),
            "cores": num_cores(),
            "threads": self.threads,
            "before": self.before,
            "after": self.after,
        }

    def _states(self) -> list[MachineState]:
        return [self.before] if self.after is None else [self.before, self.after]


def measure_machine(threads: int) -> MachineState:
    """Takes about half a second. All None where the native executor cannot run."""
    if why_unavailable() is not None:
        return MachineState()
    from noria.ops import _native

    buffer_bytes = read_buffer_bytes(last_cache_bytes())
    return MachineState(
        read_gb_s=round(_native.read_bandwidth(threads, buffer_bytes) / 1e9, 1),
        read_buffer_mib=buffer_bytes // 2**20,
        round_trip_ns=round(_native.round_trip_seconds() * 1e9, 0) or None,
        bfloat16_tflops=round(_native.bfloat16_kernel_flops(threads) / 1e12, 3),
        bfloat16_register_tflops=round(_native.bfloat16_register_flops(threads) / 1e12, 3),
        float32_tflops=round(_native.float32_kernel_flops(threads) / 1e12, 3),
        float32_register_tflops=round(_native.float32_register_flops(threads) / 1e12, 3),
    )


def read_buffer_bytes(cache_bytes: int) -> int:
    """How much is read to measure the memory behind a last cache of that size."""
    return min(max(8 * cache_bytes, LEAST_BUFFER_BYTES), MOST_BUFFER_BYTES)


def last_cache_bytes(caches: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> int:
    """The size of the first core's last cache, which is its largest; 0 where the system does not tell."""
    sizes = [path.read_text().strip() for path in caches.glob("index*/size")]
    return max((int(size.removesuffix("K")) * 1024 for size in sizes), default=0)  # Linux writes all of them in K


def cpu_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's name as Linux tells it; elsewhere what Python knows."""
    try:
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _greatest(*values: float | None) -> float | None:
    return max((value for value in values if value is not None), default=None)
