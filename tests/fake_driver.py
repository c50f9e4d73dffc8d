"""A stand-in for cuda.bindings.driver that keeps what it is asked and runs nothing, for tests without a GPU."""

import ctypes
from types import SimpleNamespace

from cuda.bindings import driver as real

OK = real.CUresult.CUDA_SUCCESS


class FakeDriver:
    """Two GPUs (compute capability 8.0 and 9.0); `calls` are (name, arguments), `launched` the parameters' bytes."""

    CUresult = real.CUresult
    CUfunction_attribute = real.CUfunction_attribute
    CUdevice_attribute = real.CUdevice_attribute
    CUstreamCaptureMode = real.CUstreamCaptureMode
    CUlaunchAttribute = real.CUlaunchAttribute
    CUlaunchAttributeID = real.CUlaunchAttributeID

    def __init__(self, *, cuda=13000, init=OK, parameter_bytes=0):
        self.cuda, self.init, self.parameter_bytes = cuda, init, parameter_bytes
        self.calls, self.launched, self.contexts = [], [], []
        self.refusals = {}  # function -> the statuses of its next calls

    def __getattr__(self, name):
        if not name.startswith("cu"):
            raise AttributeError(name)

        def call(*arguments):
            self.calls.append((name, arguments))
            if self.refusals.get(name):
                return (self.refusals[name].pop(0), None)
            return getattr(self, f"_{name}", lambda *_: (OK,))(*arguments)

        return call

    def CUlaunchConfig(self):
        return SimpleNamespace(attrs=[], numAttrs=0)

    def cuInit(self, flags):
        return (self.init,)

    def cuDriverGetVersion(self):
        return OK, self.cuda

    def cuGetErrorString(self, status):
        return OK, f"words for {status.name}".encode()

    def _cuDeviceGetCount(self):
        return OK, 2

    def _cuDeviceGet(self, index):
        return (OK, index) if index < 2 else (real.CUresult.CUDA_ERROR_INVALID_DEVICE, None)

    def _cuDeviceGetName(self, length, device):
        return OK, f"Fake {device}".encode().ljust(length, b"\0")

    def _cuDeviceGetAttribute(self, attribute, device):
        names = real.CUdevice_attribute
        return OK, {
            names.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: (8, 9)[device],
            names.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: 0,
            names.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: (108, 132)[device],
            names.CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE: (1_215_000, 3_201_000)[device],
            names.CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH: (5120, 6144)[device],
        }[attribute]

    def _cuDevicePrimaryCtxRetain(self, device):
        return OK, f"context {device}"

    def _cuCtxPushCurrent(self, context):
        self.contexts.append(context)
        return (OK,)

    def _cuCtxGetCurrent(self):
        return OK, len(self.contexts)  # 0: none

    def _cuCtxPopCurrent(self):
        return OK, self.contexts.pop()

    def _cuThreadExchangeStreamCaptureMode(self, mode):
        return OK, self.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL

    def _cuModuleLoadData(self, cubin):
        return OK, ("module", self.contexts[-1])

    def _cuModuleGetFunction(self, module, entry):
        return OK, ("function", module[1], entry)

    def _cuLaunchKernelEx(self, config, function, pointers, extra):
        first = ctypes.c_void_p.from_address(pointers).value
        content = ctypes.string_at(first, self.parameter_bytes)
        self.launched.append(SimpleNamespace(function=function, parameters=content, context=list(self.contexts)))
        self.launched[-1].__dict__.update(config.__dict__)
        return (OK,)

    def named(self, name):
        """The arguments of every call of one function."""
        return [arguments for called, arguments in self.calls if called == name]
