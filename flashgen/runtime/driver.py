"""The CUDA driver: cubins loaded into a device's primary context (the one torch uses) and launched from prebuilt parts.

The only module that imports cuda.bindings.driver.  Nothing here synchronises, and nothing allocates after a load, so a
launch may be captured into a CUDA graph.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

from flashgen.errors import LaunchError
from flashgen.planning.float8 import FLOAT8
from flashgen.runtime import nvrtc

if TYPE_CHECKING:
    from flashgen.runtime.launch import TensorMapDesc

#: What installs the bindings; named by the error about their absence.
BINDINGS = "pip install 'cuda-bindings>=12.9.4,<14'"

#: Blocks that a grid's x dimension can hold.
MAX_BLOCKS = (1 << 31) - 1

#: The first driver of each CUDA major version, for the advice to update.
_FIRST_DRIVER = {12: "525", 13: "580"}

#: Size of a CUtensorMap, and the alignment that it asks for.
_TENSOR_MAP_BYTES, _TENSOR_MAP_ALIGNMENT = 128, 64

#: What the driver calls dtypes, and rows of a swizzled pattern of so many bytes.  Elements of 8 bits are copied as they
#: are.
_TENSOR_MAP_DTYPES = {
    **{name: f"CU_TENSOR_MAP_DATA_TYPE_{name.upper()}" for name in ("float16", "bfloat16")},
    **dict.fromkeys(FLOAT8, "CU_TENSOR_MAP_DATA_TYPE_UINT8"),
}
_TENSOR_MAP_SWIZZLES = {size: f"CU_TENSOR_MAP_SWIZZLE_{size}B" for size in (32, 64, 128)}

_loading = threading.Lock()


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A GPU of this machine: its index (as torch counts), compute capability and streaming multiprocessors (SMs)."""

    index: int
    name: str
    capability: tuple[int, int]
    sms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Function:
    """A kernel loaded into the primary context of one device, ready for `smem_bytes` of dynamic shared memory."""

    handle: object
    context: object
    entry: str
    smem_bytes: int


class TensorMaps:
    """What TMA needs to know of tensors, as kernel parameters at `pointers`; tensors may move between launches.

    `addresses` says where they are, and is empty until they are encoded.
    """

    __slots__ = ("_buffer", "_descs", "_device", "_maps", "_replace", "_success", "addresses", "pointers")

    def __init__(self, descs: Sequence[TensorMapDesc], *, device: int) -> None:
        api, count = _api(), len(descs)
        self._buffer = (ctypes.c_char * (_TENSOR_MAP_BYTES * count + _TENSOR_MAP_ALIGNMENT))()
        at = -(-ctypes.addressof(self._buffer) // _TENSOR_MAP_ALIGNMENT) * _TENSOR_MAP_ALIGNMENT
        self.pointers = range(at, at + _TENSOR_MAP_BYTES * count, _TENSOR_MAP_BYTES)
        self._descs: Sequence[TensorMapDesc] = descs
        self._device = device
        self._success, self._replace = api.CUresult.CUDA_SUCCESS, api.cuTensorMapReplaceAddress
        self._maps: list[Any] = [None] * count
        self.addresses: list[int] = []

    def encode(self, addresses: Iterable[int]) -> None:
        """Make them, of tensors at these addresses; those that differ in nothing else are at the address of the first.

        The driver asks for a current context, and a thread that never touched CUDA (autograd's own, at its first node)
        has none: it is lent that of the GPU.  Raises LaunchError for a tensor that TMA cannot address.
        """
        api = _api()
        made: dict[tuple[object, ...], tuple[int, int]] = {}
        found = []
        with contextlib.nullcontext() if _has_context() else _current(_primary_context(self._device)):
            for pointer, desc, address in zip(self.pointers, self._descs, addresses, strict=True):
                same = made.get(desc[1:])
                if same is None:
                    _, dtype, sizes, strides, box, swizzle = desc
                    kind, boxes, *rest = _encoding(api.cuuint32_t, dtype, box, swizzle)
                    lengths, steps = [*map(api.cuuint64_t, sizes)], [*map(api.cuuint64_t, strides)]
                    returned = api.cuTensorMapEncodeTiled(kind, 4, address, lengths, steps, boxes, *rest)
                    if returned[0] != self._success:
                        _ok(returned, f"address a tensor of {sizes} with strides of {strides} bytes by TMA")
                    same = int(returned[1].getPtr()), address
                    made[desc[1:]] = pointer, address
                ctypes.memmove(pointer, same[0], _TENSOR_MAP_BYTES)
                found.append(same[1])
        self.addresses, self._descs = found, ()  # they are not kept

    def move(self, index: int, address: int) -> None:
        """Point one at another tensor of the same sizes and strides."""
        moved = self._maps[index]
        if moved is None:
            moved = self._maps[index] = _api().CUtensorMap(_ptr=self.pointers[index])
        if self._replace(moved, address)[0] != self._success:
            with _current(_primary_context(self._device)):
                _ok(self._replace(moved, address), "move a tensor map")
        self.addresses[index] = address


@lru_cache(maxsize=256)
def _encoding(narrow: Any, dtype: str, box: tuple[int, ...], swizzle: int) -> tuple[Any, ...]:
    """What does not depend on a problem, as the driver takes it; `narrow` is its number of 32 bits."""
    api = _api()
    return (
        getattr(api.CUtensorMapDataType, _TENSOR_MAP_DTYPES[dtype]),
        [*map(narrow, box)],
        [narrow(1)] * 4,
        api.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        getattr(api.CUtensorMapSwizzle, _TENSOR_MAP_SWIZZLES[swizzle]),
        api.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        api.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )


class Launcher:
    """Starts one function, with its grid, block and arguments in place: call it with a stream.

    `arguments` are the addresses of the kernel's parameters, whose memory the caller keeps; it writes their contents
    and the driver copies them during the call, so they may change between calls (not during one: hold a lock).  An
    `early` one starts before the kernel before it on the stream has ended, and waits for that itself; a CUDA graph
    keeps that as a programmatic edge.
    """

    __slots__ = ("_api", "_arguments", "_config", "_context", "_entry", "_given", "_start", "_stream", "_success")

    def __init__(
        self,
        function: Function,
        *,
        blocks: int,
        threads: int,
        arguments: Sequence[int],
        early: bool = False,
    ) -> None:
        api = _api()
        if blocks > MAX_BLOCKS:
            raise LaunchError(
                f"{function.entry} needs {blocks:,} blocks and a grid holds {MAX_BLOCKS:,}: split the batch"
            )
        config = api.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = blocks, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
        config.sharedMemBytes = function.smem_bytes
        config.hStream = self._stream = 0
        if early:
            config.attrs = [_early(api)]
            config.numAttrs = 1
        array = (ctypes.c_void_p * len(arguments))(*arguments)
        self._api, self._config = api, config
        self._entry, self._context = function.entry, function.context
        self._arguments = array  # alive as long as its address
        self._given = config, function.handle, ctypes.addressof(array), 0
        self._start = api.cuLaunchKernelEx
        self._success = api.CUresult.CUDA_SUCCESS

    def __call__(self, stream: int) -> None:
        """Put the kernel on `stream` (0: the default stream); raises LaunchError with the driver's reason."""
        if stream != self._stream:
            self._config.hStream = self._stream = stream
        status = self._start(*self._given)[0]
        if status != self._success:
            self._again(status)

    def _again(self, status: Any) -> None:
        """A thread that never touched CUDA has no current context; lend it the function's own for one try."""
        api = self._api
        doing = f"launch {self._entry}"
        if status in (api.CUresult.CUDA_ERROR_INVALID_CONTEXT, api.CUresult.CUDA_ERROR_INVALID_HANDLE):
            with _current(self._context):
                _ok(self._start(*self._given), doing)
        else:
            _ok((status,), doing)


def load(cubin: bytes, entry: str, *, smem_bytes: int, device: int) -> Function:
    """Load a cubin into `device`'s primary context and raise its kernel's shared memory limit to `smem_bytes`.

    Raises LaunchError where the driver refuses: a cubin of another architecture, or more shared memory than there is.
    Safe while another stream of this thread is being captured.
    """
    api = _api()
    what = f"load {entry} on GPU {device}"
    context = _primary_context(device)
    with _loading, _current(context), _uncaptured():
        module = _ok(api.cuModuleLoadData(cubin), what)
        handle = _ok(api.cuModuleGetFunction(module, entry.encode()), what)
        limit = api.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _ok(api.cuFuncSetAttribute(handle, limit, smem_bytes), f"give {entry} {smem_bytes:,} bytes of shared memory")
    return Function(handle=handle, context=context, entry=entry, smem_bytes=smem_bytes)


@cache
def gpu(index: int) -> Gpu:
    """What flashgen needs to know of GPU `index`; raises LaunchError where there is no such GPU or no driver."""
    api = _api()
    device = _ok(api.cuDeviceGet(index), f"find GPU {index}")
    attribute = api.CUdevice_attribute
    wanted = (
        attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
        attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
        attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT,
    )
    major, minor, sms = (_ok(api.cuDeviceGetAttribute(name, device), f"ask GPU {index}") for name in wanted)
    name = _ok(api.cuDeviceGetName(128, device), f"ask GPU {index}").split(b"\0")[0].decode()
    return Gpu(index=index, name=name, capability=(major, minor), sms=sms)


def gpus() -> int:
    """How many GPUs the driver shows; 0 where there is no driver."""
    try:
        api = _api()
    except LaunchError:
        return 0
    return _ok(api.cuDeviceGetCount(), "count GPUs")


@cache
def _api() -> Any:
    """The bindings, with a driver behind them that is not older than NVRTC's major version."""
    try:
        from cuda.bindings import driver as api
    except ImportError as error:
        raise LaunchError(f"cuda-bindings is not installed ({error})\n  install it: {BINDINGS}") from error
    cure = "tensors on the CPU need none: q.cpu(), k.cpu(), v.cpu()"
    try:
        status = api.cuInit(0)[0]
    except RuntimeError as error:  # pathfinder's DynamicLibNotFoundError is one
        raise LaunchError(f"no NVIDIA driver: its library cannot be loaded ({error})\n  {cure}") from error
    if status != api.CUresult.CUDA_SUCCESS:
        raise LaunchError(f"no GPU: the NVIDIA driver cannot start ({status.name})\n  {cure}")
    check_version(_checked(api, api.cuDriverGetVersion(), "ask the driver for its version"), nvrtc.version())
    return api


def check_version(driver: int, compiler: str) -> None:
    """Raise LaunchError for a driver (as cuDriverGetVersion counts: 12080) older than the NVRTC's ("13.0.88") major."""
    major = int(compiler.split(".")[0])
    has, minor = driver // 1000, driver % 1000 // 10
    if has < major:
        newest = _FIRST_DRIVER.get(major, f"of CUDA {major}")
        raise LaunchError(
            f"the NVIDIA driver knows CUDA {has}.{minor} and NVRTC {compiler} makes cubins for CUDA {major}:"
            " a driver older than NVRTC's major version cannot load them\n"
            f"  update the driver to {newest} or newer, or use the older compiler (pip warns that flashgen asks for a"
            " newer one):\n  pip uninstall -y nvidia-cuda-nvrtc &&"
            f" pip install 'nvidia-cuda-nvrtc-cu{has}' 'cuda-bindings<{has + 1}'"
        )


@cache
def _early(api: Any) -> Any:
    """The attribute of a launch whose kernel waits by itself (griddepcontrol.wait) for the one before it.

    A config keeps a copy: no call makes it anew.
    """
    attribute = api.CUlaunchAttribute()
    attribute.id = api.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    return attribute


@cache
def _primary_context(device: int) -> Any:
    api = _api()
    handle = _ok(api.cuDeviceGet(device), f"find GPU {device}")
    return _ok(api.cuDevicePrimaryCtxRetain(handle), f"enter GPU {device}")


def _has_context() -> bool:
    """Whether this thread has a current context: asked, since a call that fails is an error to compute-sanitizer."""
    status, context = _api().cuCtxGetCurrent()
    return status == _api().CUresult.CUDA_SUCCESS and int(context) != 0


@contextlib.contextmanager
def _current(context: Any) -> Iterator[None]:
    api = _api()
    _ok(api.cuCtxPushCurrent(context), "enter the GPU's context")
    try:
        yield
    finally:
        _ok(api.cuCtxPopCurrent(), "leave the GPU's context")


@contextlib.contextmanager
def _uncaptured() -> Iterator[None]:
    """Loading allocates, which a stream capture of this thread forbids unless its mode is relaxed."""
    api = _api()
    relaxed = api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    before = _ok(api.cuThreadExchangeStreamCaptureMode(relaxed), "relax the capture mode")
    try:
        yield
    finally:
        _ok(api.cuThreadExchangeStreamCaptureMode(before), "restore the capture mode")


def _ok(returned: tuple, doing: str) -> Any:
    return _checked(_api(), returned, doing)


def _checked(api: Any, returned: tuple, doing: str) -> Any:
    """The value beside a status, or LaunchError with the driver's own words."""
    status, *values = returned
    if status != api.CUresult.CUDA_SUCCESS:
        text = api.cuGetErrorString(status)[1]
        words = text.decode() if isinstance(text, bytes) else "unknown error"
        raise LaunchError(f"the NVIDIA driver cannot {doing}: {words} ({status.name})")
    return values[0] if values else None
