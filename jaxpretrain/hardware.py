"""Accelerators: the one table of what a device can do at best, found by the name that JAX gives it.

A row is one JAX *device*: a TPU v2 or v3 chip shows two, every other chip one (v4 and v5p as Google sets them up, in
megacore mode). The peaks are dense (no 2:4 sparsity) and with float32 accumulation, as XLA runs them: GeForce cards
since the 20 series, and the L40, do that at half of the rate that is advertised, which is for float16 accumulation.
A device that no row matches has no peak: a guess would make every utilisation computed from it wrong.
"""

import dataclasses
import re

_GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Accelerator:
    """One kind of device. Peaks are FLOP/s of matrix multiplication; None: no matrix unit takes that type."""

    name: str  # as it is written on the command line
    device_kind: str  # regular expression for the whole of jax.Device.device_kind
    memory_bytes: int  # nominal; drivers and XLA keep a few per cent
    bfloat16: float | None
    float16: float | None
    float32: float | None  # float32 inputs at XLA's default precision: TF32 units, one bfloat16 pass on TPUs
    float32_highest: float | None  # float32 inputs at precision "highest": CUDA cores, six bfloat16 passes on TPUs

    def peak_flops(self, compute: str, matmul: str = "default") -> float | None:
        """Peak FLOP/s for `precision.compute` and `precision.matmul` of the config; None if it is not known.

        `matmul` is about float32 inputs only, as in JAX.
        """
        assert matmul in ("default", "highest"), matmul
        if compute == "float32" and matmul == "highest":
            return self.float32_highest
        return {"bfloat16": self.bfloat16, "float16": self.float16, "float32": self.float32}[compute]


def _volta_turing(name: str, kind: str, gib: int, half: float, fp32: float) -> Accelerator:
    # No bfloat16 and no TF32 in the matrix units: float32 runs on the CUDA cores at any precision.
    return Accelerator(name, kind, gib * _GIB, None, half * 1e12, fp32 * 1e12, fp32 * 1e12)


def _ampere(name: str, kind: str, gib: int, half: float, tf32: float, fp32: float) -> Accelerator:
    """Ampere, Ada, Hopper and Blackwell."""
    return Accelerator(name, kind, gib * _GIB, half * 1e12, half * 1e12, tf32 * 1e12, fp32 * 1e12)


def _tpu(name: str, kind: str, gib: int, bf16: float) -> Accelerator:
    # float16 is emulated. XLA's "highest" splits each float32 in three bfloat16 and keeps six of the nine products.
    return Accelerator(name, kind, gib * _GIB, bf16 * 1e12, None, bf16 * 1e12, bf16 * 1e12 / 6)


# Older drivers leave out "NVIDIA ". Each GPU figure is the vendor's and equals multiprocessors x FLOP per
# clock x boost clock (tests/test_hardware.py).
_TABLE = (
    # V100 data sheet (2020); T4 data sheet; Turing architecture white paper (2018), tables 2 and 5, reference clocks.
    _volta_turing("v100-16gb", r"Tesla V100-SXM2-16GB", 16, 125.0, 15.7),
    _volta_turing("v100-32gb", r"Tesla V100-SXM2-32GB", 32, 125.0, 15.7),
    _volta_turing("v100-pcie-16gb", r"Tesla V100-PCIE-16GB", 16, 112.0, 14.0),
    _volta_turing("v100-pcie-32gb", r"Tesla V100-PCIE-32GB", 32, 112.0, 14.0),
    _volta_turing("t4", r"Tesla T4", 16, 65.0, 8.1),
    _volta_turing("rtx-2080-ti", r"(NVIDIA )?GeForce RTX 2080 Ti", 11, 53.8, 13.4),
    _volta_turing("titan-rtx", r"(NVIDIA )?TITAN RTX", 24, 130.5, 16.3),
    _volta_turing("quadro-rtx-6000", r"Quadro RTX 6000", 24, 130.5, 16.3),
    _volta_turing("quadro-rtx-8000", r"Quadro RTX 8000", 48, 130.5, 16.3),
    # A100 data sheet (2021): the same peaks in every form.
    _ampere("a100-40gb", r"(NVIDIA )?A100-(SXM4|PCIE)-40GB", 40, 312.0, 156.0, 19.5),
    _ampere("a100-80gb", r"(NVIDIA )?(A100-SXM4-80GB|A100 80GB PCIe)", 80, 312.0, 156.0, 19.5),
    # Ampere GA102 architecture white paper v2 (2021), appendices A and C; A10 data sheet (2021).
    _ampere("a10", r"NVIDIA A10", 24, 125.0, 62.5, 31.2),
    _ampere("a40", r"NVIDIA A40", 48, 149.7, 74.8, 37.4),
    _ampere("a6000", r"(NVIDIA )?RTX A6000", 48, 154.8, 77.4, 38.7),
    _ampere("rtx-3080", r"(NVIDIA )?GeForce RTX 3080", 10, 59.5, 29.8, 29.8),
    _ampere("rtx-3090", r"(NVIDIA )?GeForce RTX 3090", 24, 71.2, 35.6, 35.6),
    # Ada architecture white paper v2 (2023); L4, L40 and RTX 6000 Ada data sheets.
    _ampere("l4", r"NVIDIA L4", 24, 121.0, 60.5, 30.3),
    _ampere("l40", r"NVIDIA L40", 48, 181.0, 90.5, 90.5),
    _ampere("l40s", r"NVIDIA L40S", 48, 362.0, 183.0, 91.6),
    _ampere("rtx-6000-ada", r"NVIDIA RTX 6000 Ada Generation", 48, 364.2, 182.1, 91.1),
    _ampere("rtx-4090", r"NVIDIA GeForce RTX 4090", 24, 165.2, 82.6, 82.6),
    # H100 data sheet (its figures with sparsity, halved) and Hopper white paper; SXM and PCIe are different chips.
    _ampere("h100-pcie", r"NVIDIA H100 PCIe", 80, 756.4, 378.2, 51.2),
    _ampere("h100", r"NVIDIA H100 80GB HBM3", 80, 989.4, 494.7, 66.9),
    _ampere("h200", r"NVIDIA H200", 141, 989.4, 494.7, 66.9),
    # RTX Blackwell architecture white paper (2025), appendix A.
    _ampere("rtx-5090", r"NVIDIA GeForce RTX 5090", 32, 209.5, 104.8, 104.8),
    # Google Cloud's "System architecture" page of each generation; figures per chip, halved for v2 and v3.
    _tpu("v2", r"TPU v2", 8, 45 / 2),
    _tpu("v3", r"TPU v3", 16, 123 / 2),
    _tpu("v4", r"TPU v4", 32, 275),
    _tpu("v5e", r"TPU v5 ?(lite|e)", 16, 197),
    _tpu("v5p", r"TPU v5p?", 95, 459),
    _tpu("v6e", r"TPU v6 ?(lite|e)", 32, 918),
)


def find(device_kind: str) -> Accelerator | None:
    """The accelerator that JAX calls `device_kind` (`jax.Device.device_kind`), or None if it is not in the table.

    The whole string has to match: a laptop's "RTX 4090 Laptop GPU" or a MIG slice of an A100 is another device.
    """
    for accelerator in _TABLE:
        if re.fullmatch(accelerator.device_kind, device_kind, re.IGNORECASE):
            return accelerator
    return None
