"""The table of accelerators: one row per kind of JAX *device*, and what each can do at best.

A TPU v2, v3 or 7x chip shows two devices, as does an MI250X; every other chip one (v4 and v5p as Google sets them up,
in megacore mode). Peaks are dense (no 2:4 sparsity) and with float32 accumulation, as XLA runs them: GeForce cards
since the 20 series, and the L40, do that at half of the rate that is advertised, which is for float16 accumulation.

Vendors' figures but for: prices (`price_usd`, at launch unless a comment says more), rents (`rent_usd`, on demand, see
below), `usable_bytes` (below), and `network`, which is a choice of whoever built the cluster: 200 Gb/s per A100 and 400
per Hopper, Blackwell or MI300X GPU of an NVLink machine, 100 Gb/s per MI250X device (LUMI and Frontier), 25 Gb/s per
GPU of other data-centre machines, and 10 Gb/s Ethernet shared by four cards of a workstation. Cards with a PCIe `link`
are taken to have no NVLink bridges, which join two of them at most.
"""

import dataclasses

_GIB = 2**30
_NVLINK = {  # bytes/s in each direction, over all links of a device
    "NVLink 2": 150e9,
    "NVLink 3": 300e9,
    "NVLink 3, 8 links": 200e9,
    "NVLink 4": 450e9,
    "NVLink 5": 900e9,
    "Infinity Fabric, MI250X": 100e9,
    "Infinity Fabric, MI300X": 448e9,
}
_PCIE = {"PCIe 3": 15.75e9, "PCIe 4": 31.5e9, "PCIe 5": 63e9}  # 16 lanes, in each direction
# GeForce cards since the 20 series do not write to each other (NVIDIA/nccl-tests#117): what they send crosses the bus
# twice.
_PCIE |= {f"{name} through the host": rate / 2 for name, rate in _PCIE.items()}
GPU_MEMORY_FRACTION = 0.92  # that main.py has JAX take; the rest is for CUDA, NCCL and kernels' own buffers
_DRIVER = 0.015  # of the nominal memory: what drivers keep, up to that
# Data-centre cards with GDDR6 keep their error-correcting codes in it, and come with them turned on: nvidia-smi says
# 15360 MiB for a T4, 23034 for an L4, 23028 for an A10 and A10G, 46068 for an A40 and L40S.
_ECC = 1 / 16
_FRAGMENTS = 0.03  # of what the allocator has: micro_batch.py leaves as much


@dataclasses.dataclass(frozen=True)
class Accelerator:
    """One kind of device. Peaks are FLOP/s of matrix multiplication; None: no matrix unit takes that type."""

    name: str  # as it is written on the command line
    device_kind: str  # regular expression for the whole of jax.Device.device_kind
    generation: str
    memory_bytes: int  # nominal
    usable_bytes: int  # that a program may use: of GPUs what JAX's allocator gets, of TPUs the compiler's limit
    bfloat16: float | None
    float16: float | None
    float32: float | None  # float32 inputs at XLA's default precision: TF32 units, one bfloat16 pass on TPUs
    float32_highest: float | None  # float32 inputs at precision "highest": CUDA cores, six bfloat16 passes on TPUs
    float8: float | None
    memory_bandwidth: float  # bytes/s
    link: str  # between the devices of a node, or of a slice
    link_bandwidth: float  # bytes/s in each direction, that a ring of devices can use
    host_link: float  # bytes/s in each direction
    network: float  # bytes/s in each direction between nodes, of each device
    watts: float | None  # of the board; None: not published
    price_usd: float | None  # to buy; None: not known, or not sold
    rent_usd: float | None  # per hour
    aot_target: str | None  # of plan/aot.py; None: nothing here compiles for it
    devices_per_chip: int = 1

    @property
    def is_tpu(self) -> bool:
        return self.generation == "tpu"

    def peak_flops(self, compute: str, matmul: str = "default") -> float | None:
        """Peak FLOP/s for `precision.compute`, or `float8`, and `precision.matmul`; None if it is not known.

        `matmul` is about float32 inputs only, as in JAX.
        """
        assert matmul in ("default", "highest"), matmul
        if compute == "float32" and matmul == "highest":
            return self.float32_highest
        return getattr(self, compute)


def usable_gpu_bytes(memory_bytes: int, ecc: bool = False) -> int:
    """`ecc`: error-correcting codes share the memory with the data."""
    left = memory_bytes * (1 - _ECC if ecc else 1) * (1 - _DRIVER)
    return int(left * GPU_MEMORY_FRACTION * (1 - _FRAGMENTS))


def _gpu(
    generation: str,
    name: str,
    kind: str,
    gib: int,
    peaks: tuple[float | None, float, float],  # TFLOP/s: 16 bits, float32 by default, float32 on the CUDA cores
    bandwidth: float,  # GB/s
    link: str,
    watts: float,
    price: float | None = None,
    rent: float | None = None,
    float8: float | None = None,  # TFLOP/s
    aot: str | None = None,
    ecc: bool = False,
    devices_per_chip: int = 1,
) -> Accelerator:
    """Figures are of a device."""
    half, default, highest = (peak and peak * 1e12 for peak in peaks)
    old_buses = {"PCIe 3": ("pascal", "volta", "turing"), "PCIe 4": ("ampere", "ada", "cdna2")}
    bus = next((name for name, generations in old_buses.items() if generation in generations), "PCIe 5")
    on_board = link in _NVLINK
    if on_board:
        network = {"volta": 3.1e9, "ampere": 25e9, "cdna2": 12.5e9}.get(generation, 50e9)
    else:
        network = 0.3e9 if ("RTX" in kind or "TITAN" in kind or "GTX" in kind) else 3.1e9
    return Accelerator(
        name=name,
        device_kind=kind,
        generation=generation,
        memory_bytes=gib * _GIB,
        usable_bytes=usable_gpu_bytes(gib * _GIB, ecc),
        bfloat16=None if generation in ("pascal", "volta", "turing") else half,
        float16=half,
        float32=default,
        float32_highest=highest,
        float8=float8 and float8 * 1e12,
        memory_bandwidth=bandwidth * 1e9,
        link=link,
        link_bandwidth=_NVLINK[link] if on_board else _PCIE[link],
        host_link=450e9 if name == "gh200" else _PCIE[bus],  # NVLink-C2C
        network=network,
        watts=watts,
        price_usd=price,
        rent_usd=rent,
        aot_target=aot,
        devices_per_chip=devices_per_chip,
    )


def _tpu(
    name: str,
    kind: str,
    gib: int,
    limit: float,  # GiB that its compiler allows a program
    bf16: float,  # TFLOP/s
    bandwidth: float,  # GB/s
    link: tuple[str, float],  # topology, GB/s in each direction of one link; a ring uses two
    watts: float | None,
    rent: float | None,
    devices_per_chip: int = 1,
    float8: float | None = None,
) -> Accelerator:
    """Figures are of a device, but for the link's and the rent, which are of a chip."""
    topology, rate = link
    return Accelerator(
        name=name,
        device_kind=kind,
        generation="tpu",
        memory_bytes=gib * _GIB,
        usable_bytes=int(limit * _GIB),
        bfloat16=bf16 * 1e12,
        float16=None,  # emulated
        float32=bf16 * 1e12,
        # XLA's "highest" splits each float32 in three bfloat16 and keeps six of the nine products.
        float32_highest=bf16 * 1e12 / 6,
        float8=float8 and float8 * 1e12,
        memory_bandwidth=bandwidth * 1e9,
        link=topology,
        link_bandwidth=2 * rate * 1e9 / devices_per_chip,
        host_link=15.75e9 / devices_per_chip,  # PCIe 3, an assumption
        network=6.25e9 / devices_per_chip,  # 200 Gb/s for the four chips of a host: an assumption
        watts=watts,
        price_usd=None,
        rent_usd=rent and rent / devices_per_chip,
        aot_target=name if name != "tpu7x" else None,
        devices_per_chip=devices_per_chip,
    )


# Older drivers leave out "NVIDIA ". Each GPU peak is the vendor's and equals multiprocessors x FLOP per clock x boost
# clock (tests/test_hardware.py), each bandwidth the bus's width x its rate.
# Prices: 3090, A6000, A100-80 and H100 are those of arXiv 2410.23261, others the vendors' at launch.
# Rents per hour: RunPod's lowest in March 2026 as deploybase.ai lists them (one of its pages calls them spot prices,
# another says that $2.69 for an H100 is on demand); V100, T4, A10G: AWS in us-east-1, of one GPU of an instance. By
# SkyPilot's catalogue (github.com/skypilot-org/skypilot-catalog): A100-40, A10, A6000, Quadro RTX 6000 and GH200 of
# Lambda (v8 at 0f40703), A40 and MI300X of RunPod (v7 at 0727c2b).
ACCELERATORS = (
    # Pascal white paper (2016): no matrix units; float16 at 1/64 of the rate of float32.
    _gpu("pascal", "gtx-1080-ti", r"(NVIDIA )?GeForce GTX 1080 Ti", 11, (None, 11.3, 11.3), 484, "PCIe 3", 250, 699),
    # V100 data sheet (2020); T4 data sheet; Turing architecture white paper (2018), tables 2 and 5, reference clocks.
    # Neither has bfloat16 or TF32: float32 runs on the CUDA cores at any precision.
    _gpu("volta", "v100-16gb", r"Tesla V100-SXM2-16GB", 16, (125.0, 15.7, 15.7), 900, "NVLink 2", 300, rent=3.06),
    _gpu("volta", "v100-32gb", r"Tesla V100-SXM2-32GB", 32, (125.0, 15.7, 15.7), 900, "NVLink 2", 300),
    _gpu("volta", "v100-pcie-16gb", r"Tesla V100-PCIE-16GB", 16, (112.0, 14.0, 14.0), 900, "PCIe 3", 250),
    _gpu("volta", "v100-pcie-32gb", r"Tesla V100-PCIE-32GB", 32, (112.0, 14.0, 14.0), 900, "PCIe 3", 250),
    _gpu("turing", "t4", r"Tesla T4", 16, (65.0, 8.1, 8.1), 320, "PCIe 3", 70, rent=0.526,
         ecc=True),
    _gpu("turing", "rtx-2080-ti", r"(NVIDIA )?GeForce RTX 2080 Ti", 11, (53.8, 13.4, 13.4), 616,
         "PCIe 3 through the host", 250, 999),
    _gpu("turing", "titan-rtx", r"(NVIDIA )?TITAN RTX", 24, (130.5, 16.3, 16.3), 672, "PCIe 3", 280, 2499),
    _gpu("turing", "quadro-rtx-6000", r"Quadro RTX 6000", 24, (130.5, 16.3, 16.3), 672, "PCIe 3", 260, 6300, 0.69),
    _gpu("turing", "quadro-rtx-8000", r"Quadro RTX 8000", 48, (130.5, 16.3, 16.3), 672, "PCIe 3", 260, 9999),
    # A100 data sheet (2021): the same peaks in every form. The A800 is an A100 with fewer links. A30 data sheet (2022).
    _gpu("ampere", "a100-40gb", r"(NVIDIA )?A100-SXM4-40GB", 40, (312.0, 156.0, 19.5), 1555, "NVLink 3", 400,
         rent=1.99, aot="a100-40gb"),
    _gpu("ampere", "a100-80gb", r"(NVIDIA )?A100-SXM4-80GB", 80, (312.0, 156.0, 19.5), 2039, "NVLink 3", 400, 19_000,
         1.39, aot="a100-80gb"),
    _gpu("ampere", "a100-pcie-40gb", r"(NVIDIA )?A100-PCIE-40GB", 40, (312.0, 156.0, 19.5), 1555, "PCIe 4", 250,
         rent=1.99),
    _gpu("ampere", "a100-pcie-80gb", r"(NVIDIA )?A100 80GB PCIe", 80, (312.0, 156.0, 19.5), 1935, "PCIe 4", 300,
         rent=1.19),
    _gpu("ampere", "a800-80gb", r"(NVIDIA )?A800-SXM4-80GB", 80, (312.0, 156.0, 19.5), 2039, "NVLink 3, 8 links", 400),
    _gpu("ampere", "a30", r"NVIDIA A30", 24, (165.0, 82.0, 10.3), 933, "PCIe 4", 165),
    # Ampere GA102 architecture white paper v2 (2021), appendices A and C; data sheets of A10, A10G, A4000 to A5000.
    _gpu("ampere", "a10", r"NVIDIA A10", 24, (125.0, 62.5, 31.2), 600, "PCIe 4", 150, rent=1.29, ecc=True),
    _gpu("ampere", "a10g", r"NVIDIA A10G", 24, (70.0, 35.0, 35.0), 600, "PCIe 4", 300, rent=1.006, ecc=True),
    _gpu("ampere", "a40", r"NVIDIA A40", 48, (149.7, 74.8, 37.4), 696, "PCIe 4", 300, rent=0.44, ecc=True),
    _gpu("ampere", "a4000", r"(NVIDIA )?RTX A4000", 16, (76.7, 38.3, 19.2), 448, "PCIe 4", 140, 1000),
    _gpu("ampere", "a4500", r"(NVIDIA )?RTX A4500", 20, (94.6, 47.3, 23.7), 640, "PCIe 4", 200),
    _gpu("ampere", "a5000", r"(NVIDIA )?RTX A5000", 24, (111.1, 55.6, 27.8), 768, "PCIe 4", 230, 2250),
    _gpu("ampere", "a6000", r"(NVIDIA )?RTX A6000", 48, (154.8, 77.4, 38.7), 768, "PCIe 4", 300, 4800, 1.09),
    _gpu("ampere", "rtx-3080", r"(NVIDIA )?GeForce RTX 3080", 10, (59.5, 29.8, 29.8), 760, "PCIe 4 through the host",
         320, 699),
    _gpu("ampere", "rtx-3090", r"(NVIDIA )?GeForce RTX 3090", 24, (71.2, 35.6, 35.6), 936, "PCIe 4 through the host",
         350, 1300, 0.22, aot="rtx-3090"),
    # Ada architecture white paper v2 (2023); L4, L40 and RTX 6000 Ada data sheets.
    _gpu("ada", "l4", r"NVIDIA L4", 24, (121.0, 60.5, 30.3), 300, "PCIe 4", 72, rent=0.44, float8=242.5, ecc=True),
    _gpu("ada", "l40", r"NVIDIA L40", 48, (181.0, 90.5, 90.5), 864, "PCIe 4", 300, rent=0.69, float8=362.0, ecc=True),
    _gpu("ada", "l40s", r"NVIDIA L40S", 48, (362.0, 183.0, 91.6), 864, "PCIe 4", 350, rent=0.79, float8=733.0,
         ecc=True),
    _gpu("ada", "rtx-6000-ada", r"NVIDIA RTX 6000 Ada Generation", 48, (364.2, 182.1, 91.1), 960, "PCIe 4", 300, 6800,
         float8=728.5),
    _gpu("ada", "rtx-4090", r"NVIDIA GeForce RTX 4090", 24, (165.2, 82.6, 82.6), 1008, "PCIe 4 through the host", 450,
         1599, 0.34, float8=330.3),
    # H100 data sheet (its figures with sparsity, halved) and Hopper white paper; SXM, PCIe and NVL are different chips.
    _gpu("hopper", "h100-pcie", r"NVIDIA H100 PCIe", 80, (756.4, 378.2, 51.2), 2039, "PCIe 5", 350, rent=1.99,
         float8=1513.0),
    _gpu("hopper", "h100-nvl", r"NVIDIA H100 NVL", 94, (835.5, 417.5, 60.0), 3938, "PCIe 5", 400, float8=1671.0),
    _gpu("hopper", "h100", r"NVIDIA H100 80GB HBM3", 80, (989.4, 494.7, 66.9), 3350, "NVLink 4", 700, 30_000, 2.69,
         float8=1978.9, aot="h100"),
    _gpu("hopper", "h200", r"NVIDIA H200", 141, (989.4, 494.7, 66.9), 4800, "NVLink 4", 700, rent=3.59, float8=1978.9),
    # The driver names a GH200 by its processor's memory. Its power is that of the GPU alone, an assumption.
    _gpu("hopper", "gh200", r"NVIDIA GH200 (120|480)GB", 96, (989.4, 494.7, 66.9), 4000, "NVLink 4", 700, rent=2.29,
         float8=1978.9),
    # RTX Blackwell architecture white paper (2025), appendix A; data sheets of RTX PRO 6000 and HGX B200.
    _gpu("blackwell", "rtx-5090", r"NVIDIA GeForce RTX 5090", 32, (209.5, 104.8, 104.8), 1792,
         "PCIe 5 through the host", 575, 1999, 0.69, float8=419.0),
    _gpu("blackwell", "rtx-pro-6000", r"NVIDIA RTX PRO 6000 Blackwell (Workstation|Server) Edition", 96,
         (503.8, 251.9, 126.0), 1792, "PCIe 5", 600, 8565, 0.89, float8=1007.6),
    _gpu("blackwell", "b200", r"NVIDIA B200", 180, (2250.0, 1125.0, 75.0), 7700, "NVLink 5", 1000, rent=5.98,
         float8=4500.0),
    # AMD data sheets. XLA runs float32 on the float32 matrix units. Half of an MI250X is a device; its links to others
    # are 200, 100 and 50 GB/s, of which a ring is taken to get the middle: an assumption.
    _gpu("cdna2", "mi250x", r"AMD Instinct MI250X.*", 64, (191.5, 47.9, 47.9), 1638, "Infinity Fabric, MI250X", 280,
         devices_per_chip=2),
    _gpu("cdna3", "mi300x", r"AMD Instinct MI300X.*", 192, (1307.4, 163.4, 163.4), 5300, "Infinity Fabric, MI300X", 750,
         rent=2.49, float8=2614.9),
    # Google Cloud's "System architecture" page of each generation; rents in us regions, on demand; power where
    # published: the design power of v2 and v3 (Jouppi et al. 2020), of v4 the highest measured (Jouppi et al. 2023; by
    # that measure a v3 is 131 W).
    _tpu("v2", r"TPU v2", 8, 7.48, 45 / 2, 350, ("ICI, 2D torus", 62), 140, 4.50 / 4, devices_per_chip=2),
    _tpu("v3", r"TPU v3", 16, 15.48, 123 / 2, 450, ("ICI, 2D torus", 82), 225, 8.00 / 4, devices_per_chip=2),
    _tpu("v4", r"TPU v4", 32, 30.75, 275, 1228, ("ICI, 3D torus", 50), 192, 3.22),
    _tpu("v5e", r"TPU v5 ?(lite|e)", 16, 15.75, 197, 819, ("ICI, 2D torus", 50), None, 1.20),
    _tpu("v5p", r"TPU v5p?", 95, 95, 459, 2765, ("ICI, 3D torus", 100), None, 4.20),
    _tpu("v6e", r"TPU v6 ?(lite|e)", 32, 31.25, 918, 1638, ("ICI, 2D torus", 100), None, 2.70, float8=918),
    _tpu("tpu7x", r"TPU7x", 96, 94.75, 1153.5, 3690, ("ICI, 3D torus", 100), None, None, devices_per_chip=2,
         float8=2307),
)  # fmt: skip
