"""What GPUs can hold and compute at most, as their makers state it: for estimates, never for claims."""

from __future__ import annotations

from dataclasses import dataclass

from solrl.errors import UsageError


@dataclass(frozen=True)
class Gpu:
    """One GPU; speeds are peaks for dense matrices with FP32 sums, None where the format is not native."""

    name: str
    memory_gib: float
    """What a process can take, rounded down."""
    bf16_tflops: float
    fp8_tflops: float | None = None
    nvfp4_tflops: float | None = None

    def tflops(self, number_format: str) -> float | None:
        """The peak in "full", "fp8" or "nvfp4"."""
        return {"full": self.bf16_tflops, "fp8": self.fp8_tflops, "nvfp4": self.nvfp4_tflops}[number_format]

    @property
    def cheapest(self) -> str:
        """What explore.precision = auto takes where it has been proved."""
        return "nvfp4" if self.nvfp4_tflops else "fp8" if self.fp8_tflops else "full"


GPUS = {
    "a100": Gpu("A100 80GB", 79, 312),
    "h100": Gpu("H100 SXM", 79, 989, 1979),
    "h200": Gpu("H200 SXM", 139, 989, 1979),
    "b200": Gpu("B200", 178, 2250, 4500, 9000),
    "b300": Gpu("B300", 267, 2250, 4500, 13500),
    "l40s": Gpu("L40S", 44, 362, 733),
    "rtx4090": Gpu("RTX 4090", 23, 165, 330),
    "rtx5090": Gpu("RTX 5090", 31, 210, 419, 1676),
}
"""Memory and peaks from NVIDIA's data sheets."""


def find_gpu(name: str) -> Gpu:
    """The GPU of a name as in `--gpu`; UsageError where it is not known."""
    key = name.lower().replace("-", "").replace("_", "").replace(" ", "")
    if key not in GPUS:
        raise UsageError(f"--gpu {name}: known are {', '.join(GPUS)}")
    return GPUS[key]
