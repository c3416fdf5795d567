"""The C API of (simulated) CANN through ctypes, without torch.

For tests that must see exact codes, argument by argument. `Device` owns what
it hands out; `close` destroys it, so that a test ends with nothing alive.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field

FLOAT16, INT8, INT32, INT64, BFLOAT16 = 1, 2, 3, 9, 27
ND, FRACTAL_NZ = 2, 29
ITEMSIZE = {FLOAT16: 2, INT8: 1, INT32: 4, INT64: 8, BFLOAT16: 2}

_P = ctypes.c_void_p
_I64 = ctypes.c_int64
_U64 = ctypes.c_uint64
_INT = ctypes.c_int
_TO_DEVICE, _TO_HOST = 1, 2


def _numbers(values: Sequence[int]) -> ctypes.Array[_I64]:
    return (_I64 * max(len(values), 1))(*values)


def product(values: Sequence[int]) -> int:
    """Product of all numbers, 1 for none."""
    out = 1
    for value in values:
        out *= value
    return out


@dataclass
class Tensor:
    """A described piece of device memory."""

    handle: int
    pointer: int
    shape: tuple[int, ...]
    dtype: int


@dataclass
class Device:
    """One simulated NPU with a stream, and the functions of the libraries."""

    number: int = 0
    atb: bool = False
    stream: int = 0
    tensors: list[Tensor] = field(default_factory=list)
    buffers: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Load the libraries and make the stream."""
        self.acl = ctypes.CDLL("libascendcl.so")
        self.nn = ctypes.CDLL("libnnopbase.so")
        self.ops = ctypes.CDLL("libopapi.so")
        self.lib_atb = ctypes.CDLL("libatb.so") if self.atb else None
        self.nn.aclCreateTensor.restype = _P
        self.nn.aclCreateTensor.argtypes = [_P, _U64, _INT, _P, _I64, _INT, _P, _U64, _P]
        self.nn.aclDestroyTensor.argtypes = [_P]
        self.nn.aclCreateIntArray.restype = _P
        self.nn.aclCreateIntArray.argtypes = [_P, _U64]
        self.nn.aclDestroyIntArray.argtypes = [_P]
        self.nn.aclDestroyAclOpExecutor.argtypes = [_P]
        self.nn.aclSetAclOpExecutorRepeatable.argtypes = [_P]
        self.acl.aclrtMalloc.argtypes = [_P, ctypes.c_size_t, _INT]
        self.acl.aclrtFree.argtypes = [_P]
        self.acl.aclrtMemcpy.argtypes = [_P, ctypes.c_size_t, _P, ctypes.c_size_t, _INT]
        self.acl.aclrtSynchronizeStream.argtypes = [_P]
        self.acl.aclrtDestroyStream.argtypes = [_P]
        self.acl.aclGetRecentErrMsg.restype = ctypes.c_char_p
        self.use()
        self.stream = self.new_stream()

    def use(self) -> None:
        """Make this the current device of the thread."""
        assert self.acl.aclrtSetDevice(self.number) == 0

    def new_stream(self) -> int:
        """Create a stream on the current device."""
        out = _P()
        assert self.acl.aclrtCreateStream(ctypes.byref(out)) == 0
        return out.value or 0

    def malloc(self, count: int) -> int:
        """Allocate `count` bytes (at least one)."""
        out = _P()
        assert self.acl.aclrtMalloc(ctypes.byref(out), max(count, 1), 0) == 0
        assert out.value
        self.buffers.append(out.value)
        return out.value

    def free(self, pointer: int) -> None:
        """Free device memory."""
        self.buffers.remove(pointer)
        assert self.acl.aclrtFree(pointer) == 0

    def upload(self, data: bytes) -> int:
        """Allocate and fill device memory."""
        pointer = self.malloc(len(data))
        if data:
            code = self.acl.aclrtMemcpy(pointer, len(data), ctypes.c_char_p(data), len(data), _TO_DEVICE)
            assert code == 0
        return pointer

    def download(self, pointer: int, count: int) -> bytes:
        """Read device memory back, after the stream is done."""
        self.sync()
        buffer = ctypes.create_string_buffer(max(count, 1))
        if count:
            code = self.acl.aclrtMemcpy(buffer, count, pointer, count, _TO_HOST)
            assert code == 0
        return buffer.raw[:count]

    def sync(self) -> int:
        """Wait for the stream."""
        return self.acl.aclrtSynchronizeStream(self.stream)

    def describe(
        self,
        pointer: int,
        shape: Sequence[int],
        dtype: int,
        *,
        strides: Sequence[int] | None = None,
        offset: int = 0,
        fmt: int = ND,
        storage: Sequence[int] | None = None,
    ) -> Tensor:
        """Create an aclTensor over device memory."""
        if strides is None:
            strides = [product(shape[i + 1 :]) for i in range(len(shape))]
        if storage is None:
            storage = shape
        handle = self.nn.aclCreateTensor(
            _numbers(shape),
            len(shape),
            dtype,
            _numbers(strides),
            offset,
            fmt,
            _numbers(storage),
            len(storage),
            pointer,
        )
        assert handle
        tensor = Tensor(handle, pointer, tuple(shape), dtype)
        self.tensors.append(tensor)
        return tensor

    def tensor(self, data: bytes, shape: Sequence[int], dtype: int, *, fmt: int = ND) -> Tensor:
        """Upload bytes and describe them."""
        return self.describe(self.upload(data), shape, dtype, fmt=fmt)

    def zeros(self, shape: Sequence[int], dtype: int, *, fmt: int = ND) -> Tensor:
        """A tensor of zero bytes."""
        return self.tensor(bytes(product(shape) * ITEMSIZE[dtype]), shape, dtype, fmt=fmt)

    def int32(self, values: Sequence[int], shape: Sequence[int] | None = None) -> Tensor:
        """An int32 tensor, flat unless a shape is given."""
        data = b"".join(v.to_bytes(4, "little", signed=True) for v in values)
        return self.tensor(data, shape or [len(values)], INT32)

    def int64(self, values: Sequence[int]) -> Tensor:
        """A flat int64 tensor."""
        data = b"".join(v.to_bytes(8, "little", signed=True) for v in values)
        return self.tensor(data, [len(values)], INT64)

    def read(self, tensor: Tensor) -> bytes:
        """All bytes of a dense tensor."""
        return self.download(tensor.pointer, product(tensor.shape) * ITEMSIZE[tensor.dtype])

    def destroy(self, tensor: Tensor) -> None:
        """Destroy the descriptor, not the memory."""
        self.tensors.remove(tensor)
        assert self.nn.aclDestroyTensor(tensor.handle) == 0

    def close(self) -> None:
        """Destroy all descriptors, free all memory, destroy the stream."""
        self.sync()
        for tensor in list(self.tensors):
            self.destroy(tensor)
        for pointer in list(self.buffers):
            self.free(pointer)
        assert self.acl.aclrtDestroyStream(self.stream) == 0

    # ---- two-phase calls ---------------------------------------------------

    def phase_one(self, op: str, *arguments: object) -> tuple[int, int, int]:
        """Call op's first phase; returns (code, workspace bytes, executor)."""
        workspace = _U64()
        executor = _P()
        converted = [a.handle if isinstance(a, Tensor) else a for a in arguments]
        converted = [_P(a) if isinstance(a, int) and a > 2**31 else a for a in converted]
        function = getattr(self.ops, f"{op}GetWorkspaceSize")
        code = function(*converted, ctypes.byref(workspace), ctypes.byref(executor))
        return code, workspace.value, executor.value or 0

    def phase_two(self, op: str, workspace: int, size: int, executor: int) -> int:
        """Call op's second phase on the stream."""
        function = getattr(self.ops, op)
        function.argtypes = [_P, _U64, _P, _P]
        return function(workspace, size, executor, self.stream)

    def call(self, op: str, *arguments: object) -> int:
        """Both phases with a workspace that lives until the stream is done."""
        code, size, executor = self.phase_one(op, *arguments)
        if code:
            return code
        workspace = self.malloc(size) if size else 0
        code = self.phase_two(op, workspace, size, executor)
        if workspace:
            self.sync()
            self.free(workspace)
        return code

    def scatter_arguments(
        self,
        key: Tensor | None,
        value: Tensor | None,
        key_cache: Tensor | None,
        value_cache: Tensor | None,
        slots: Tensor | None,
        *,
        compress_lens: Tensor | None = None,
        compress_offsets: Tensor | None = None,
        seq_lens: Tensor | None = None,
        cache_mode: str | None = "Norm",
        scatter_mode: str | None = "None",
        strides: int | None = None,
        offsets: int | None = None,
    ) -> list[object]:
        """Arguments of aclnnScatterPaKvCache in CANN's order."""

        def text(mode: str | None) -> object:
            return None if mode is None else ctypes.c_char_p(mode.encode())

        return [
            key,
            key_cache,
            slots,
            value,
            value_cache,
            compress_lens,
            compress_offsets,
            seq_lens,
            text(cache_mode),
            text(scatter_mode),
            strides,
            offsets,
        ]

    def scatter(self, *arguments: Tensor | None, **options: object) -> int:
        """Both phases of aclnnScatterPaKvCache; see `scatter_arguments`."""
        return self.call("aclnnScatterPaKvCache", *self.scatter_arguments(*arguments, **options))

    def int_array(self, values: Sequence[int]) -> int:
        """Create an aclIntArray."""
        return self.nn.aclCreateIntArray(_numbers(values), len(values))

    # ---- ATB ---------------------------------------------------------------

    def atb_context(self) -> int:
        """Create an atb::Context and give it the stream."""
        out = _P()
        assert self.lib_atb is not None
        assert self.lib_atb._ZN3atb13CreateContextEPPNS_7ContextE(ctypes.byref(out)) == 0
        assert out.value
        assert self.set_atb_stream(out.value, self.stream) == 0
        return out.value

    def set_atb_stream(self, context: int, stream: int) -> int:
        """Call Context::SetExecuteStream through its vtable slot, number 2."""
        table = ctypes.cast(context, ctypes.POINTER(_P))[0]
        slot = ctypes.cast(table, ctypes.POINTER(_P))[2]
        method = ctypes.CFUNCTYPE(_INT, _P, _P)(slot)
        return method(context, stream)

    def destroy_atb_context(self, context: int) -> int:
        """Destroy an atb::Context."""
        assert self.lib_atb is not None
        function = self.lib_atb._ZN3atb14DestroyContextEPNS_7ContextE
        function.argtypes = [_P]
        return function(context)

    def destroy_atb_operation(self, operation: int) -> int:
        """Destroy an atb::Operation."""
        assert self.lib_atb is not None
        function = self.lib_atb._ZN3atb16DestroyOperationEPNS_9OperationE
        function.argtypes = [_P]
        return function(operation)

    def load_setup(
        self,
        tensors: Sequence[Tensor | None],
        cfg: int,
        cumsum: bool,
        has_starts: bool,
        context: int,
        operation: int = 0,
    ) -> tuple[int, int, int]:
        """First phase of AtbPagedCacheLoad: (status, workspace, operation)."""
        assert self.lib_atb is not None
        workspace = _U64()
        op = _P(operation)
        function = self.lib_atb.AtbPagedCacheLoadGetWorkspaceSize
        function.argtypes = [_P] * 7 + [ctypes.c_int8, ctypes.c_bool, ctypes.c_bool] + [_P] * 3
        status = function(
            *[t.handle if t else None for t in tensors],
            cfg,
            cumsum,
            has_starts,
            ctypes.byref(workspace),
            ctypes.byref(op),
            context,
        )
        return status, workspace.value, op.value or 0

    def load_execute(self, operation: int, context: int) -> int:
        """Second phase of AtbPagedCacheLoad, without a workspace."""
        assert self.lib_atb is not None
        function = self.lib_atb.AtbPagedCacheLoad
        function.argtypes = [_P, _U64, _P, _P]
        return function(None, 0, operation, context)
