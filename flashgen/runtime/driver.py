"""The CUDA driver: cubins loaded into a device's primary context (the one torch uses) and launched from prebuilt parts.

The only module that imports cuda.bindings.driver.  Nothing here synchronises, and nothing allocates after a load, so a
launch may be captured into a CUDA graph.
"""

from __future__ import annotations

import contextlib
import ctypes
import struct
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

from flashgen.errors import LaunchError
from flashgen.planning.float8 import FLOAT8
from flashgen.planning.once import Remembered
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
TENSOR_MAP_BYTES, TENSOR_MAP_ALIGNMENT = 128, 64

#: What the driver calls dtypes, and rows of a swizzled pattern of so many bytes.  Elements of 8 bits are copied as they
#: are.
_TENSOR_MAP_DTYPES = {
    **{name: f"CU_TENSOR_MAP_DATA_TYPE_{name.upper()}" for name in ("float16", "bfloat16")},
    **dict.fromkeys(FLOAT8, "CU_TENSOR_MAP_DATA_TYPE_UINT8"),
}
_TENSOR_MAP_SWIZZLES = {size: f"CU_TENSOR_MAP_SWIZZLE_{size}B" for size in (32, 64, 128)}

#: What makes a map, and what points one at another tensor.
ENCODE, REPLACE = b"cuTensorMapEncodeTiled", b"cuTensorMapReplaceAddress"

#: Memory of an H200 moves more bytes per second than this, that of an H100 fewer.
FAST_MEMORY = 4e12

#: What the driver cannot do where the latter fails.
MOVING = "move a tensor map"

_loading = threading.Lock()


class _Thread(threading.local):
    """Whether this thread had a current context when it last asked: it is not asked again, which takes a microsecond,
    as hardly any thread gives one up."""

    had_context = False


_thread = _Thread()


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A GPU of this machine: its index (as torch counts), compute capability, streaming multiprocessors (SMs), and what
    its memory moves at most in bytes per second."""

    index: int
    name: str
    capability: tuple[int, int]
    sms: int
    memory_bytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Function:
    """A kernel loaded into the primary context of one device, ready for `smem_bytes` of dynamic shared memory."""

    handle: object
    context: object
    entry: str
    smem_bytes: int


def maps(device: int) -> Maps:
    """What makes tensor maps of tensors on a GPU."""
    return _maps(_api(), device)


#: How maps of some rank and box are encoded: what packs addresses, sizes and strides, and the driver's arguments.
_Call = tuple[Any, tuple[object, ...]]


class Maps:
    """cuTensorMapEncodeTiled and cuTensorMapReplaceAddress for one GPU, called at their addresses: each new length asks
    for four maps, and the bindings make an object of every number, and of the map, which is then copied (4.4 us a map
    in place of 1.5).  A map of the same sizes and strides as an earlier one, as v beside k and o beside q, is a copy of
    that one which points elsewhere: the driver takes two arguments for it in place of twelve.

    Where a copy misses, L2 fetches 128 bytes, a row of the widest box, or 256, which bring what the box beside it asks
    for.  Decoding, head_dim 128, 16 sequences of 4k keys, 32:32 heads: on an H200 269 us with 256 and 258 with 128, 8
    of 32k, 32:8 heads, 270 and 263; on an H100, whose memory has fewer channels, 363.8 with 256 and 371.5 with 128, 1
    of 32k, 32:8 heads, 62.4 and 63.0; prefill is equally fast.  Without promotion the same as with 128.
    """

    __slots__ = (
        *("_api", "_calls", "_copy", "_device", "_encode", "_lock", "_made", "_pack_pair", "_pair"),
        *("_replace", "_slow", "_words"),
    )

    def __init__(self, api: Any, device: int) -> None:
        self._api, self._device = api, device
        self._slow = gpu(device).memory_bytes_per_s < FAST_MEMORY
        self._encode, self._replace = (self._function(name) for name in (ENCODE, REPLACE))
        self._words = (ctypes.c_uint64 * 11)()  # where the map lies, and the tensor; sizes; strides
        self._pack_pair = struct.Struct("=2Q").pack_into
        self._copy = struct.Struct(f"{TENSOR_MAP_BYTES}s").pack_into
        self._pair = tuple(ctypes.c_void_p.from_buffer(self._words, 8 * i) for i in range(2))
        self._calls: dict[tuple[object, ...], _Call] = {}  # as many as there are boxes of kernels
        #: Maps by all but names and addresses.
        self._made: Remembered[tuple[object, ...], bytes] = Remembered()
        self._lock = threading.Lock()

    def _function(self, name: bytes) -> Any:
        # Of CUDA 12.0, the first that has it.
        entry = _checked(self._api, self._api.cuGetProcAddress(name, 12_000, 0)[:2], "encode tensor maps")
        return ctypes.PYFUNCTYPE(ctypes.c_int)(entry)  # the interpreter waits: it is over in no time

    def encode(
        self, buffer: ctypes.Array, places: Iterable[int], descs: Iterable[TensorMapDesc], addresses: Iterable[int]
    ) -> None:
        """Write what TMA needs to know of tensors at `addresses` to places of a buffer, which have addresses that are
        multiples of TENSOR_MAP_ALIGNMENT.

        The driver asks for a current context, and a thread that never touched CUDA (autograd's own, at its first node)
        has none: it is lent that of the GPU.  Raises LaunchError for a tensor that TMA cannot address.
        """
        if not (_thread.had_context or _has_context()):
            with _current(_primary_context(self._device)):
                self._write(buffer, places, descs, addresses)
            return
        _thread.had_context = True
        self._write(buffer, places, descs, addresses)

    def _write(
        self, buffer: ctypes.Array, places: Iterable[int], descs: Iterable[TensorMapDesc], addresses: Iterable[int]
    ) -> None:
        words, made, start = self._words, self._made, ctypes.addressof(buffer)
        moved, pair = self._pair, self._pack_pair
        with self._lock:
            for place, desc, at in zip(places, descs, addresses, strict=True):
                form = desc[1:]
                if (known := made.get(form)) is not None:
                    self._copy(buffer, place, known)
                    pair(words, 0, start + place, at)
                    if status := self._replace(*moved):
                        self._again(self._replace, moved, status, _addressing(form))
                    continue
                sizes, strides, dtype, box, swizzle, row_bytes = form
                pack, arguments = self._calls.get(form[2:]) or self._call(dtype, box, swizzle, row_bytes)
                pack(words, 0, start + place, at, *sizes, *strides)
                if status := self._encode(*arguments):
                    self._again(self._encode, arguments, status, _addressing(form))
                made.keep(form, buffer[place : place + TENSOR_MAP_BYTES])

    def move(self, pointer: int, address: int) -> None:
        """Point a map that was written there at another tensor of the same sizes and strides."""
        with self._lock:
            self._pack_pair(self._words, 0, pointer, address)
            if status := self._replace(*self._pair):
                self._again(self._replace, self._pair, status, MOVING)

    def _again(self, function: Any, arguments: tuple[object, ...], status: int, doing: str) -> None:
        """A thread that has a current context no more is lent that of the GPU for one try."""
        api = self._api
        if api.CUresult(status) == api.CUresult.CUDA_ERROR_INVALID_CONTEXT:
            _thread.had_context = False
            with _current(_primary_context(self._device)):
                status = function(*arguments)
        _checked(api, (api.CUresult(status),), doing)

    def _call(self, dtype: str, box: tuple[int, ...], swizzle: int, row_bytes: int) -> _Call:
        """That of maps with this, which no problem decides; what its arguments hold beside it is in `_words`."""
        api, rank, by = self._api, len(box), ctypes.byref  # what `by` makes is passed on as it is
        fetched = api.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B
        if self._slow and row_bytes >= 256:
            fetched = api.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B
        (pointer, address), numbers = self._pair, ctypes.c_uint32 * rank
        made = (
            pointer,
            int(getattr(api.CUtensorMapDataType, _TENSOR_MAP_DTYPES[dtype])),
            rank,
            address,
            by(self._words, 2 * 8),
            by(self._words, (2 + rank) * 8),
            by(numbers(*box)),
            by(numbers(*[1] * rank)),
            int(api.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE),
            int(getattr(api.CUtensorMapSwizzle, _TENSOR_MAP_SWIZZLES[swizzle])),
            int(fetched),
            int(api.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE),
        )
        call = self._calls[dtype, box, swizzle, row_bytes] = struct.Struct(f"={1 + 2 * rank}Q").pack_into, made
        return call


def _addressing(form: tuple[object, ...]) -> str:
    """What is done for a map, for a message."""
    return f"address a tensor of {form[0]} with strides of {form[1]} bytes by TMA"


@lru_cache(maxsize=16)
def _maps(api: Any, device: int) -> Maps:
    return Maps(api, device)


class Launcher:
    """Starts one function, of blocks of so many `threads`: call it with a stream, the number of blocks, and the
    addresses of the kernel's parameters.

    The caller keeps their memory and writes their contents, which the driver copies during the call.  All that a call
    has in common with the one before it stays in place: one call at a time (hold a lock).  An `early` kernel starts
    before the kernel before it on the stream has ended, and waits for that itself; a CUDA graph keeps that as a
    programmatic edge.
    """

    __slots__ = (
        *(
            "_api",
            "_array",
            "_blocks",
            "_config",
            "_function",
            "_given",
            "_parameters",
            "_start",
            "_stream",
            "_success",
        ),
    )

    def __init__(self, function: Function, *, threads: int, early: bool = False) -> None:
        api = _api()
        config = api.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = 1, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
        config.sharedMemBytes = function.smem_bytes
        config.hStream = self._stream = 0
        if early:
            config.attrs = [_early(api)]
            config.numAttrs = 1
        self._api, self._config, self._function = api, config, function
        self._blocks = 1
        self._parameters: tuple[int, ...] = ()
        self._array, self._given = None, ()  # until a call says how many parameters there are
        self._start, self._success = api.cuLaunchKernelEx, api.CUresult.CUDA_SUCCESS

    def __call__(self, stream: int, blocks: int, parameters: tuple[int, ...]) -> None:
        """Put the kernel on `stream` (0: the default stream); raises LaunchError with the driver's reason."""
        if stream != self._stream:
            self._config.hStream = self._stream = stream
        if blocks != self._blocks:
            self._config.gridDimX = self._blocks = blocks
        if parameters is not self._parameters:
            self._point(parameters)
        status = self._start(*self._given)[0]
        if status != self._success:
            self._again(status)

    def _point(self, parameters: tuple[int, ...]) -> None:
        if self._array is None:
            self._array = (ctypes.c_void_p * len(parameters))()  # alive as long as its address
            self._given = self._config, self._function.handle, ctypes.addressof(self._array), 0
        self._array[:] = parameters
        self._parameters = parameters

    def _again(self, status: Any) -> None:
        """A thread that never touched CUDA has no current context; lend it the function's own for one try."""
        api = self._api
        doing = f"launch {self._function.entry}"
        if status in (api.CUresult.CUDA_ERROR_INVALID_CONTEXT, api.CUresult.CUDA_ERROR_INVALID_HANDLE):
            with _current(self._function.context):
                _ok(self._start(*self._given), doing)
        else:
            _ok((status,), doing)


def check_blocks(entry: str, blocks: int) -> None:
    """Raise LaunchError for more blocks than a grid holds."""
    if blocks > MAX_BLOCKS:
        raise LaunchError(f"{entry} needs {blocks:,} blocks and a grid holds {MAX_BLOCKS:,}: split the batch")


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
        attribute.CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE,
        attribute.CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH,
    )
    major, minor, sms, khz, bits = (_ok(api.cuDeviceGetAttribute(name, device), f"ask GPU {index}") for name in wanted)
    name = _ok(api.cuDeviceGetName(128, device), f"ask GPU {index}").split(b"\0")[0].decode()
    moved = 2 * khz * 1e3 * bits / 8  # two transfers in a clock
    return Gpu(index=index, name=name, capability=(major, minor), sms=sms, memory_bytes_per_s=moved)


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
