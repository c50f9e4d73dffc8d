"""A GPU made of the PTX interpreter: attention()'s whole GPU path runs, from torch tensors to emitted kernels and back.

Device memory is one block of host memory, filled with NaN; tensors on it say that they are on a GPU.  The driver keeps
modules and contexts as the fake one does, and runs launches on the parameters that it is given, byte by byte.
"""

import ctypes
import struct

import numpy as np
import torch
from cuda.bindings import driver as real
from fake_driver import OK, FakeDriver

from flashgen.codegen import emit, params
from flashgen.ops import forward, records
from flashgen.planning.plan import KernelPlan
from flashgen.runtime import cache, driver, kernel, nvrtc, ptx
from flashgen.runtime.ptx.tensormap import TensorMap

BYTES, ALIGNMENT = 8 << 20, 512


class OnGpu(torch.Tensor):
    """A tensor in the emulated GPU's memory."""

    is_cuda = property(lambda self: True)
    device = property(lambda self: torch.device("cuda", 0))


class EmulatedGpu(FakeDriver):
    """One GPU of a given compute capability with four SMs."""

    CUtensorMapDataType = real.CUtensorMapDataType
    CUtensorMapInterleave = real.CUtensorMapInterleave
    CUtensorMapSwizzle = real.CUtensorMapSwizzle
    CUtensorMapL2promotion = real.CUtensorMapL2promotion
    CUtensorMapFloatOOBfill = real.CUtensorMapFloatOOBfill
    cuuint32_t = cuuint64_t = int

    class CUtensorMap:
        """A map that lies at a host address."""

        def __init__(self, _ptr: int) -> None:
            self.address = _ptr

        def getPtr(self) -> int:
            return self.address

    def __init__(self, capability: tuple[int, int] = (8, 0)) -> None:
        super().__init__()
        self.capability, self.plans, self.held, self.launches = capability, {}, [], []
        room = np.full(BYTES + ALIGNMENT, 0xFF, np.uint8)  # NaN as any float
        start = -room.ctypes.data % ALIGNMENT
        self.memory, self.taken = room[start : start + BYTES], 0

    # Memory

    def empty(self, shape, strides, dtype) -> torch.Tensor:
        """A tensor of NaN (integers: of ones) with 16 poisoned bytes before what comes next."""
        last = sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) if 0 not in shape else -1
        size = (last + 1) * dtype.itemsize
        start, self.taken = self.taken, -(-(self.taken + size + 16) // 256) * 256
        assert self.taken <= BYTES, "the emulated GPU is out of memory"
        flat = torch.from_numpy(self.memory[start : start + max(size, dtype.itemsize)]).view(dtype)
        return flat.as_strided(shape, strides).as_subclass(OnGpu)

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of a tensor, of its strides, in the GPU's memory."""
        there = self.empty(tensor.shape, tensor.stride(), tensor.dtype)
        there.as_subclass(torch.Tensor).copy_(tensor)
        return there

    # Driver

    def _cuDeviceGetCount(self):
        return OK, 1

    def _cuDeviceGetAttribute(self, attribute, device):
        names = real.CUdevice_attribute
        return OK, {
            names.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: self.capability[0],
            names.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: self.capability[1],
            names.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: 4,
        }[attribute]

    def _cuModuleLoadData(self, cubin):
        return OK, ("module", cubin)

    def _cuTensorMapEncodeTiled(self, *arguments):
        if not self.contexts:  # as the driver does
            return real.CUresult.CUDA_ERROR_INVALID_CONTEXT, None
        buffer = ctypes.create_string_buffer(TensorMap.encode_tiled(*arguments).to_bytes(), 128)
        self.held.append(buffer)
        return OK, self.CUtensorMap(ctypes.addressof(buffer))

    def _cuTensorMapReplaceAddress(self, tensor_map, address):
        ctypes.c_uint64.from_address(tensor_map.address + _ADDRESS_OFFSET).value = address
        return (OK,)

    def _cuLaunchKernelEx(self, config, function, pointers, extra):
        plan: KernelPlan = self.plans[function[1]]
        memory = ptx.Memory()
        base = memory.add("memory", self.memory, writable=True)
        moved = base - self.memory.ctypes.data
        maps = len(params.maps(plan))
        sizes = [128] * maps + [params.sizeof(plan)]
        addresses = (ctypes.c_void_p * len(sizes)).from_address(pointers)
        given = [bytearray(ctypes.string_at(a, n)) for a, n in zip(addresses, sizes, strict=True)]
        places = [(tensor_map, _ADDRESS_OFFSET) for tensor_map in given[:maps]]
        places += [(given[-1], 8 * i) for i, f in enumerate(params.fields(plan)) if f.format == "Q"]
        for content, offset in places:
            (address,) = struct.unpack_from("<Q", content, offset)
            struct.pack_into("<Q", content, offset, address + moved)
        module = ptx.load(nvrtc.ptx(emit(plan), plan.arch), target=plan.arch)
        grid, block = config.gridDimX, config.blockDimX
        report = module.launch(
            function[2].decode(), grid, block, config.sharedMemBytes, [bytes(one) for one in given], memory
        )
        self.launches.append((plan, config, report))
        return (OK,)


#: Where a tensor map of the interpreter keeps the address of its tensor.
_ADDRESS_OFFSET = 8


def install(monkeypatch, capability: tuple[int, int]) -> EmulatedGpu:
    """Make an emulated GPU the one that flashgen and torch see; kernels are emitted, and compiled to PTX alone."""
    gpu = EmulatedGpu(capability)
    resources = nvrtc.Resources(registers=1, spill_stores=0, spill_loads=0, stack_bytes=0, smem_static=0)

    def build(plan):
        gpu.plans[cache.key(plan).encode()] = plan
        return cache.Entry(cubin=cache.key(plan).encode(), resources=resources, about={}, hit=False)

    def contiguous(shape):
        return torch.empty(shape, device="meta").stride()

    class Torch:
        """torch, but for where it allocates."""

        empty_strided = staticmethod(lambda s, t, dtype, device: gpu.empty(s, t, dtype))
        empty = staticmethod(lambda s, dtype, device: gpu.empty(s, contiguous(s), dtype))
        zeros = staticmethod(lambda n, dtype, device: gpu.empty((n,), (1,), dtype).zero_())

        def __getattr__(self, name):
            return getattr(torch, name)

    for cached in (driver.gpu, driver._primary_context):
        monkeypatch.setattr(driver, cached.__name__, cached.__wrapped__)
    monkeypatch.setattr(driver, "_api", lambda: gpu)
    monkeypatch.setattr(kernel, "build", build)
    for module, name in ((kernel, "_kernels"), (records, "_calls"), (forward, "_zeros")):
        monkeypatch.setattr(module, name, {})
    monkeypatch.setattr(forward, "torch", Torch())
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return gpu
