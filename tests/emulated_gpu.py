"""A GPU made of the PTX interpreter: attention()'s whole GPU path runs, from torch tensors to emitted kernels and back.

Device memory is that of the interpreter; tensors in it say that they are on a GPU and give addresses there.  The driver
keeps modules and contexts as the fake one does, and runs launches on the parameters that it is given, byte by byte.
What stands for a cubin is PTX.
"""

import contextlib
import ctypes
import dataclasses

import numpy as np
import torch
from cuda.bindings import driver as real
from fake_driver import OK, FakeDriver

from flashgen import interpreter
from flashgen.codegen import emit
from flashgen.interpreter.tensormap import TensorMap
from flashgen.ops import backward, forward, memory, menus, records
from flashgen.runtime import cache, driver, kernel, nvrtc


class OnGpu(torch.Tensor):
    """A tensor in the emulated GPU's memory; `placed` has the address of each storage there."""

    placed: dict[int, int] = {}  # noqa: RUF012 (install gives each GPU its own)
    is_cuda = property(lambda self: True)
    device = property(lambda self: torch.device("cuda", 0))

    def data_ptr(self) -> int:
        start = self.untyped_storage().data_ptr()
        return self.placed[start] + super().data_ptr() - start


class EmulatedGpu(FakeDriver):
    """One GPU of a given compute capability with four SMs."""

    CUtensorMapDataType = real.CUtensorMapDataType
    CUtensorMapInterleave = real.CUtensorMapInterleave
    CUtensorMapSwizzle = real.CUtensorMapSwizzle
    CUtensorMapL2promotion = real.CUtensorMapL2promotion
    CUtensorMapFloatOOBfill = real.CUtensorMapFloatOOBfill

    memory_khz = 3_201_000

    def __init__(self, capability: tuple[int, int] = (8, 0)) -> None:
        super().__init__()
        self.capability, self.plans, self.launches = capability, {}, []
        self.memory, self.placed, self.entries = interpreter.Memory(), {}, {}

    # Memory

    def empty(self, shape, strides, dtype) -> torch.Tensor:
        """A tensor of NaN (integers: of ones)."""
        last = sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) if 0 not in shape else 0
        room = np.full((last + 1) * dtype.itemsize, 0xFF, np.uint8)
        self.placed[room.ctypes.data] = self.memory.add(f"tensor {len(self.placed)}", room, writable=True)
        return torch.from_numpy(room).view(dtype).as_strided(shape, strides).as_subclass(OnGpu)

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
            names.CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE: self.memory_khz,
            names.CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH: 6144,
        }[attribute]

    def _cuModuleLoadData(self, cubin):
        return OK, ("module", cubin)

    def _cuGetProcAddress(self, name, version, flags):
        """Of what flashgen calls at its address: a function that does as the driver's, and is called by our name."""
        if not self.entries:

            def encode(pointer, kind, rank, address, sizes, strides, box, steps, *kinds):
                given = [
                    (ctypes.c_uint64 * rank).from_address(sizes),
                    (ctypes.c_uint64 * (rank - 1)).from_address(strides),
                ]
                given += [(ctypes.c_uint32 * rank).from_address(at) for at in (box, steps)]
                interleave, swizzle, promotion, fill = kinds
                made = (
                    *(real.CUtensorMapDataType(kind), rank, address, *map(tuple, given)),
                    *(real.CUtensorMapInterleave(interleave), real.CUtensorMapSwizzle(swizzle)),
                    *(real.CUtensorMapL2promotion(promotion), real.CUtensorMapFloatOOBfill(fill)),
                )
                status, *content = self.cuTensorMapEncodeTiled(*made)
                if status == OK:
                    ctypes.memmove(pointer, content[0], 128)
                return int(status)

            def replace(pointer, address):
                return int(self.cuTensorMapReplaceAddress(pointer, address)[0])

            types = [ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, *5 * [ctypes.c_void_p], *4 * [ctypes.c_int]]
            self.entries[driver.ENCODE] = ctypes.PYFUNCTYPE(ctypes.c_int, *types)(encode)
            self.entries[driver.REPLACE] = ctypes.PYFUNCTYPE(ctypes.c_int, *2 * [ctypes.c_void_p])(replace)
        return OK, ctypes.cast(self.entries[name], ctypes.c_void_p).value, None

    def _cuTensorMapEncodeTiled(self, *arguments):
        if not self.contexts:  # as the driver does
            return real.CUresult.CUDA_ERROR_INVALID_CONTEXT, None
        return OK, TensorMap.encode_tiled(*arguments).to_bytes()

    def _cuTensorMapReplaceAddress(self, pointer, address):
        before = TensorMap.from_bytes(ctypes.string_at(pointer, 128))
        ctypes.memmove(pointer, dataclasses.replace(before, address=address).to_bytes(), 128)
        return (OK,)

    def _cuLaunchKernelEx(self, config, function, pointers, extra):
        _, cubin, entry = function
        module = interpreter.load(cubin.decode())
        sizes = [parameter.size for parameter in module.entry(entry.decode()).params]
        addresses = (ctypes.c_void_p * len(sizes)).from_address(pointers)
        given = [ctypes.string_at(a, n) for a, n in zip(addresses, sizes, strict=True)]
        grid, block = config.gridDimX, config.blockDimX
        report = module.launch(entry.decode(), grid, block, config.sharedMemBytes, given, self.memory)
        self.launches.append((self.plans[cubin], config, report))
        return (OK,)


def install(monkeypatch, capability: tuple[int, int]) -> EmulatedGpu:
    """Make an emulated GPU the one that flashgen and torch see; kernels are emitted, and compiled to PTX alone."""
    gpu = EmulatedGpu(capability)
    resources = nvrtc.Resources(registers=1, spill_stores=0, spill_loads=0, stack_bytes=0, smem_static=0)

    def build(plan):
        text = nvrtc.ptx(emit(plan), plan.arch).encode()
        gpu.plans[text] = plan
        return cache.Entry(cubin=text, resources=resources, about={}, hit=False)

    def contiguous(shape, dtype, device):
        shape = torch.Size([shape] if isinstance(shape, int) else shape)
        return gpu.empty(shape, torch.empty(shape, device="meta").stride(), dtype)

    class Torch:
        """torch, but for where it allocates."""

        empty_strided = staticmethod(lambda s, t, dtype, device: gpu.empty(s, t, dtype))
        empty = staticmethod(contiguous)
        zeros = staticmethod(lambda *given, **options: contiguous(*given, **options).zero_())

        def __getattr__(self, name):
            return getattr(torch, name)

    for cached in (driver.gpu, driver._primary_context):
        monkeypatch.setattr(driver, cached.__name__, cached.__wrapped__)
    monkeypatch.setattr(driver, "_api", lambda: gpu)
    monkeypatch.setattr(kernel, "build", build)
    for module, name in ((kernel, "_kernels"), (records, "_calls"), (memory, "_of_streams"), (menus, "_told")):
        monkeypatch.setattr(module, name, {})
    for name, value in (("_of_graphs", {}), ("_kept", []), ("_aside", contextlib.nullcontext)):
        monkeypatch.setattr(memory, name, value)
    for module in (forward, backward):
        monkeypatch.setattr(module, "torch", Torch())
    monkeypatch.setattr(memory, "empty_strided", gpu.empty)
    monkeypatch.setattr(OnGpu, "placed", gpu.placed)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return gpu
