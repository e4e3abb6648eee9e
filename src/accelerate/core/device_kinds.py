# SPDX-License-Identifier: Apache-2.0
"""The kinds of devices and the published figures of accelerators, a row each. No torch: the launcher reads them."""

from __future__ import annotations

from typing import NamedTuple

from .enums import DistributedType


class DeviceKind(NamedTuple):
    """What differs between kinds of devices. Everything else goes through `torch.accelerator`.

    Fields:
        type: torch's device type. backend: of its collectives. distributed: the kind of run over several of them.
        visible: the environment variable that limits which devices a process sees.
        vendor_visible: further such variables, of vendors whose devices torch shows under this type.
        pin_memory: whether copies from pinned host memory are faster.
        init_method: of the process group, where it is not the environment's.
        extension: the package that brings the device to torch; None where torch has it itself.
        device_files: pattern below /dev by which the devices are counted without torch.
        ray: the name of its resource in a Ray cluster. kubernetes: that of its device plugin.
        moves_modules: modules have a method of this name (`module.npu()`).
    """

    type: str
    backend: str
    distributed: DistributedType
    visible: str | None = None
    vendor_visible: tuple[str, ...] = ()
    pin_memory: bool = True
    init_method: str | None = None
    extension: str | None = None
    device_files: str | None = None
    ray: str | None = None
    kubernetes: str | None = None
    moves_modules: bool = False


_ROWS = (
    DeviceKind("cpu", "gloo", DistributedType.MULTI_CPU, pin_memory=False),
    DeviceKind(
        "cuda", "nccl", DistributedType.MULTI_GPU, "CUDA_VISIBLE_DEVICES",
        vendor_visible=("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
        ray="GPU", kubernetes="nvidia.com/gpu", moves_modules=True,
    ),
    DeviceKind(
        "xpu", "xccl", DistributedType.MULTI_XPU, "ZE_AFFINITY_MASK", vendor_visible=("ONEAPI_DEVICE_SELECTOR",),
        kubernetes="gpu.intel.com/i915", moves_modules=True,
    ),
    DeviceKind("mps", "gloo", DistributedType.NO, pin_memory=False),
    DeviceKind(
        "npu", "hccl", DistributedType.MULTI_NPU, "ASCEND_RT_VISIBLE_DEVICES",
        extension="torch_npu", device_files="davinci[0-9]*", ray="NPU", moves_modules=True,
    ),
    DeviceKind(
        "hpu", "hccl", DistributedType.MULTI_HPU, "HABANA_VISIBLE_MODULES",
        extension="habana_frameworks", device_files="accel/accel[0-9]*", ray="HPU", kubernetes="habana.ai/gaudi",
        moves_modules=True,
    ),
    DeviceKind(
        "mlu", "cncl", DistributedType.MULTI_MLU, "MLU_VISIBLE_DEVICES",
        extension="torch_mlu", device_files="cambricon_dev[0-9]*", moves_modules=True,
    ),
    DeviceKind(
        "sdaa", "tccl", DistributedType.MULTI_SDAA, "SDAA_VISIBLE_DEVICES",
        extension="torch_sdaa", device_files="tcaicard[0-9]*", moves_modules=True,
    ),
    DeviceKind(
        "musa", "mccl", DistributedType.MULTI_MUSA, "MUSA_VISIBLE_DEVICES",
        extension="torch_musa", device_files="mtgpu.[0-9]*", moves_modules=True,
    ),
    DeviceKind(
        "neuron", "neuron", DistributedType.MULTI_NEURON, "NEURON_RT_VISIBLE_CORES",
        extension="torch_neuronx", device_files="neuron[0-9]*", ray="neuron_cores",
        kubernetes="aws.amazon.com/neuron",
    ),
    DeviceKind("xla", "xla", DistributedType.XLA, pin_memory=False, init_method="xla://"),
)  # fmt: skip

DEVICES: dict[str, DeviceKind] = {row.type: row for row in _ROWS}
# All variables that limit which devices a process sees.
VISIBLE = tuple(
    name for row in _ROWS for name in (row.visible, *row.vendor_visible) if name is not None
)


class Published(NamedTuple):
    """What the maker of an accelerator publishes.

    Attributes:
        memory: GB.
        tflops: TFLOP/s of bf16 matrix products without sparsity.
        bandwidth: GB/s of the memory.
        link: GB/s of one device within a machine, in one direction.
    """

    memory: float
    tflops: float
    bandwidth: float
    link: float


PUBLISHED: dict[str, Published] = {
    "a100": Published(80, 312, 2039, 300),
    "h100": Published(80, 989, 3350, 450),
    "h100pcie": Published(80, 756, 2000, 32),
    "h200": Published(141, 989, 4800, 450),
    "b200": Published(192, 2250, 8000, 900),
    "mi300x": Published(192, 1307, 5300, 448),
    "l4": Published(24, 121, 300, 32),
    "l40s": Published(48, 362, 864, 32),
    "rtx4090": Published(24, 165, 1008, 32),
}


def known_name(name: str) -> str | None:
    """The row of `PUBLISHED` for a device that calls itself `name`, as "NVIDIA H100 80GB HBM3"; None without one."""
    plain = name.lower().replace(" ", "").replace("-", "")
    # Of names with the same beginning the longest is meant: an L40S is no L4.
    return max((known for known in PUBLISHED if known in plain), key=len, default=None)
