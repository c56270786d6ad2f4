"""Where the tensors lie in a file that torch.save wrote, found without running anything of it.

Such a file is an uncompressed zip: `NAME/data.pkl` says what was saved, `NAME/data/K` are the raw bytes of storage K.
The pickle is not unpickled. Its opcodes are stepped through by a small machine that knows containers, numbers, text
and the few names that a dictionary of tensors needs (`ALLOWED`), and that calls nothing: a tensor becomes a record of
dtype, offset, shape and strides. Anything else is refused with its name.

Inside gzip (`.ckpt.gz`) nothing can be read by offset: `Stream` walks the records from the beginning.

Cost: about 0.4 ms a file, of which no byte of the large tensors is read. No torch is imported.
"""

from __future__ import annotations

import contextlib
import functools
import gzip
import os
import pickletools
import struct
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

ITEMSIZE = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip
_STORAGES = {
    "DoubleStorage": "float64", "FloatStorage": "float32", "HalfStorage": "float16", "BFloat16Storage": "bfloat16",
    "LongStorage": "int64", "IntStorage": "int32", "ShortStorage": "int16", "CharStorage": "int8",
    "ByteStorage": "uint8", "BoolStorage": "bool",
}  # fmt: skip
# All that such a pickle may name. Nothing of it is imported: a name is a pair of strings here.
ALLOWED = {
    ("collections", "OrderedDict"),
    ("torch._utils", "_rebuild_tensor_v2"),
    ("torch._utils", "_rebuild_tensor_v3"),
    ("torch.storage", "UntypedStorage"),
    *(("torch", name) for name in _STORAGES),
    *(("torch", name) for name in ITEMSIZE),
}
_PICKLE_BYTES = 16 << 20  # a dictionary of tensors takes a few kilobytes
_LOCAL_HEADER = struct.Struct("<4s5H3I2H")  # signature .. crc, sizes, length of name, length of extra
# What zipfile raises, by where the damage is.
_ZIP_ERRORS = (
    zipfile.BadZipFile, zipfile.LargeZipFile, EOFError, struct.error, zlib.error, NotImplementedError, RuntimeError,
    ValueError, KeyError,
)  # fmt: skip
_GZIP_SLACK = 1 << 16  # zip headers, padding, pickle and directory around the storages


class Unreadable(Exception):
    """Why a file cannot be used, as the end of a sentence that begins with its name."""


class Saved(NamedTuple):
    """A tensor in a file: dtype; its storage's key; element offset into the storage; shape and strides in elements."""

    dtype: str
    key: str
    start: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    storage_bytes: int
    offset: int = -1  # first byte in the file, once `locate` has found it

    @property
    def numel(self) -> int:
        n = 1
        for size in self.shape:
            n *= size
        return n

    @property
    def contiguous(self) -> bool:
        """Whether its elements lie one behind the other."""
        step = 1
        for size, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and stride != step:
                return False
            step *= size
        return True

    def rows(self) -> tuple[int, int, int]:
        """(rows, values in a row, bytes from one row to the next) of [T, H] or [1, T, H]. Raises Unreadable."""
        shape, stride = list(self.shape), list(self.stride)
        while len(shape) > 2 and shape[0] == 1:
            shape, stride = shape[1:], stride[1:]
        if len(shape) != 2 or 0 in shape:
            raise Unreadable(f"a state has shape {list(self.shape)}, not [T, H]")
        if (stride[1] != 1 and shape[1] > 1) or (stride[0] < shape[1] and shape[0] > 1):
            raise Unreadable("its states are not stored row by row")
        return shape[0], shape[1], max(stride[0], shape[1]) * ITEMSIZE[self.dtype]


def open_saved(path: Path) -> Any:
    """What torch.save wrote to `path`, with a located `Saved` for every tensor. Raises Unreadable, OSError."""
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size == 0:
            raise Unreadable("is empty")
        try:
            with zipfile.ZipFile(file) as archive:
                return _locate_all(file, archive)
        except _ZIP_ERRORS as error:
            raise Unreadable(f"cannot be read (no whole torch zip: {error or type(error).__name__})") from None


def _locate_all(file: IO[bytes], archive: zipfile.ZipFile) -> Any:
    names = {info.filename: info for info in archive.infolist()}
    pickles = [name for name in names if name.endswith("/data.pkl")]
    if len(pickles) != 1:
        raise Unreadable("cannot be read (a zip, but not one of torch.save)")
    prefix = pickles[0].removesuffix("data.pkl")
    order = names.get(prefix + "byteorder")
    if order is not None and archive.read(order) != b"little":
        raise Unreadable("was written on a big-endian machine: save it again on this one")
    if names[pickles[0]].file_size > _PICKLE_BYTES:
        raise Unreadable("holds a pickle too large to be a dictionary of tensors")
    tree, saved = _parse_once(archive.read(pickles[0]))
    starts: dict[str, int] = {}
    for tensor in saved:
        info = names.get(f"{prefix}data/{tensor.key}")
        if info is None or info.compress_type != zipfile.ZIP_STORED or info.file_size != tensor.storage_bytes:
            raise Unreadable(f"cannot be read (its storage {tensor.key} is missing, compressed or of another size)")
        if tensor.key not in starts:
            starts[tensor.key] = _data_start(file, info)
    end = os.fstat(file.fileno()).st_size

    def located(tensor: Saved) -> Saved:
        start = starts[tensor.key]
        if start + tensor.storage_bytes > end:
            raise Unreadable("cannot be read (it is truncated)")
        return tensor._replace(offset=start + tensor.start * ITEMSIZE[tensor.dtype])

    return replace(tree, located)


def _data_start(file: IO[bytes], info: zipfile.ZipInfo) -> int:
    file.seek(info.header_offset)
    fields = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
    if fields[0] != b"PK\x03\x04":
        raise Unreadable("cannot be read (its zip directory points to no record)")
    return int(info.header_offset + _LOCAL_HEADER.size + fields[9] + fields[10])


def replace(tree: Any, change: Any) -> Any:
    """The dictionary, list or tuple `tree` with every `Saved` in its first three levels changed.

    A container that stands in many places is walked once, so a small pickle cannot unfold into a large tree.
    """
    done: dict[tuple[int, int], Any] = {}

    def walk(node: Any, depth: int) -> Any:
        if isinstance(node, Saved):
            return change(node)
        if not depth or type(node) not in (dict, list, tuple):
            return node
        if (id(node), depth) not in done:
            if isinstance(node, dict):
                made: Any = {key: walk(value, depth - 1) for key, value in node.items()}
            else:
                made = type(node)(walk(value, depth - 1) for value in node)
            done[id(node), depth] = made
        return done[id(node), depth]

    return walk(tree, 3)


# -- the pickle ------------------------------------------------------------------------------------------------------


class _Name(NamedTuple):
    """Something that the pickle names, as text; it is never looked up."""

    module: str
    name: str


class _Storage(NamedTuple):
    dtype: str | None  # None: untyped, the tensor says
    key: str
    numel: int


_MARK = object()
_VALUES = {
    "NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT",
    "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8",
}  # fmt: skip
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}


def parse(data: bytes | IO[bytes]) -> tuple[Any, list[Saved]]:
    """What a pickle of tensors says, and its tensors (not yet located). Nothing is called. Raises Unreadable.

    data: the pickle, or a stream that stands at its first byte and is read exactly to its end.
    """
    tensors: list[Saved] = []
    try:
        return _run(data, tensors), tensors
    except Unreadable:
        raise
    except (ValueError, IndexError, KeyError, TypeError, OverflowError, EOFError, UnicodeDecodeError) as error:
        raise Unreadable(f"cannot be read (its pickle is damaged: {type(error).__name__})") from None


# Pickles hold shapes, not values: samples of one length have the same one.
_parse_once = functools.lru_cache(4096)(parse)


def _run(data: bytes | IO[bytes], tensors: list[Saved]) -> Any:
    stack: list[Any] = []
    memo: dict[int, Any] = {}

    def to_mark() -> list[Any]:
        at = len(stack) - 1
        while stack[at] is not _MARK:
            at -= 1  # below 0 this raises IndexError in the end
        taken = stack[at + 1 :]
        del stack[at:]
        return taken

    argument: Any
    for opcode, argument, _ in pickletools.genops(data):
        name = opcode.name
        if name in _VALUES:
            stack.append(_CONSTANTS.get(name, argument))
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
        elif name in ("BINPUT", "LONG_BINPUT"):
            memo[argument] = stack[-1]
        elif name == "MEMOIZE":
            memo[len(memo)] = stack[-1]
        elif name == "MARK":
            stack.append(_MARK)
        elif name in ("EMPTY_DICT", "EMPTY_LIST", "EMPTY_TUPLE"):
            stack.append({"EMPTY_DICT": dict, "EMPTY_LIST": list, "EMPTY_TUPLE": tuple}[name]())
        elif name == "TUPLE":
            stack.append(tuple(to_mark()))
        elif name in ("TUPLE1", "TUPLE2", "TUPLE3"):
            count = int(name[-1])
            stack[-count:] = [tuple(stack[-count:])]
        elif name in ("APPEND", "APPENDS"):
            values = [stack.pop()] if name == "APPEND" else to_mark()
            _of(list, stack[-1]).extend(values)
        elif name in ("SETITEM", "SETITEMS"):
            pairs = [stack.pop(-2), stack.pop()] if name == "SETITEM" else to_mark()
            _of(dict, stack[-1]).update(zip(pairs[::2], pairs[1::2], strict=True))
        elif name == "GLOBAL":
            stack.append(_named(*argument.split(" ", 1)))
        elif name == "STACK_GLOBAL":
            last = stack.pop()
            stack.append(_named(stack.pop(), last))
        elif name == "BINPERSID":
            stack.append(_storage(stack.pop()))
        elif name == "REDUCE":
            arguments = stack.pop()
            stack.append(_made(stack.pop(), arguments, tensors))
        elif name == "STOP":
            return stack.pop()
        elif name not in ("PROTO", "FRAME"):
            raise Unreadable(f"is refused: its pickle does {name}, which no dictionary of tensors needs")
    raise EOFError


def _of(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise TypeError
    return value


def _named(module: object, name: object) -> _Name:
    if (module, name) not in ALLOWED:
        raise Unreadable(f"is refused: its pickle names {module}.{name}, which no dictionary of tensors needs")
    return _Name(str(module), str(name))


def _storage(said: Any) -> _Storage:
    what, kind, key, _device, numel = said
    if what != "storage" or not isinstance(kind, _Name) or not isinstance(key, str) or type(numel) is not int:
        raise TypeError
    if kind.name in _STORAGES:
        return _Storage(_STORAGES[kind.name], key, numel)
    if kind.name == "UntypedStorage":
        return _Storage(None, key, numel)
    raise TypeError


def _made(what: Any, arguments: Any, tensors: list[Saved]) -> Any:
    """What calling `what` would have given, for the three that may be called."""
    if not isinstance(what, _Name):
        raise Unreadable("is refused: its pickle calls something that is no name")
    if what.name == "OrderedDict" and arguments == ():
        return {}
    if what.name == "_rebuild_tensor_v2":
        storage, start, shape, stride, *_ = arguments
        extra = arguments[6] if len(arguments) > 6 else None
        dtype = storage.dtype
    elif what.name == "_rebuild_tensor_v3":
        storage, start, shape, stride, _, _, named, *more = arguments
        dtype, extra = named.name, more[0] if more else None
    else:
        raise Unreadable(f"is refused: its pickle calls {what.module}.{what.name} in a way that torch.save does not")
    if not isinstance(storage, _Storage) or dtype not in ITEMSIZE or extra:
        raise TypeError
    numbers = (start, *shape, *stride)
    if len(shape) != len(stride) or any(type(n) is not int or n < 0 for n in numbers):
        raise TypeError
    itemsize = ITEMSIZE[dtype]
    storage_bytes = storage.numel * (1 if storage.dtype is None else ITEMSIZE[storage.dtype])
    last = start + sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) + 1
    if 0 not in shape and last * itemsize > storage_bytes:
        raise Unreadable("cannot be read (a tensor reaches past its storage)")
    made = Saved(dtype, storage.key, start, tuple(shape), tuple(stride), storage_bytes)
    tensors.append(made)
    return made


# -- inside gzip -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _damage_told() -> Iterator[None]:
    try:
        yield
    except (OSError, EOFError, zlib.error, struct.error) as error:
        raise Unreadable(f"cannot be read (damaged gzip or zip: {error or type(error).__name__})") from None


class Stream:
    """A torch zip inside gzip, from the beginning: the pickle first, then one storage after the other.

    Raises Unreadable. Decompressing costs 8 s of one core per GB, whatever is kept of it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: Any = gzip.open(path, "rb")  # noqa: SIM115
        self.tree: Any = None
        self._sizes: dict[str, int] = {}

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def storages(self) -> Iterator[tuple[str, int]]:
        """(key, bytes) of every storage as the stream reaches it; `tree` is there by then. Take it by `take`."""
        with _damage_told():
            for name in self._records():
                if name.endswith("/data.pkl"):
                    self.tree, saved = parse(self._file)
                    self._sizes = {tensor.key: tensor.storage_bytes for tensor in saved}
                elif "/data/" in name:
                    key = name.rsplit("/", 1)[1]
                    if key not in self._sizes:
                        raise Unreadable(f"cannot be read (its storage {key} belongs to no tensor)")
                    self._left = self._sizes[key]
                    yield key, self._left
                    while self._left:
                        self.take(min(self._left, 1 << 20))
                self._skip_descriptor()

    def is_whole(self) -> bool:
        """Whether the file ends as a gzip of these storages does: a cut one is told without decompressing it."""
        with self._path.open("rb") as file:
            file.seek(-4, os.SEEK_END)
            size = int.from_bytes(file.read(4), "little")  # of the decompressed file, modulo 2**32
        return (size - sum(self._sizes.values())) % (1 << 32) < _GZIP_SLACK

    def take(self, count: int) -> bytes:
        """The next bytes of the storage that `storages` stands at."""
        if count > self._left:
            raise EOFError
        self._left -= count
        with _damage_told():
            return self._exactly(count)

    def _exactly(self, count: int) -> bytes:
        data: bytes = self._file.read(count)
        if len(data) != count:
            raise EOFError("it ends early")
        return data

    def _records(self) -> Iterator[str]:
        """The names of the records, the stream standing at each one's data."""
        self._pending = b""
        while True:
            head = self._pending + self._exactly(_LOCAL_HEADER.size - len(self._pending))
            fields = _LOCAL_HEADER.unpack(head)
            if fields[0] != b"PK\x03\x04":
                if fields[0][:2] != b"PK":
                    raise Unreadable("cannot be read (no torch zip inside the gzip)")
                return  # the zip directory: the records are over
            if fields[3]:
                raise Unreadable("cannot be read (a compressed zip inside the gzip)")
            name = self._exactly(fields[9]).decode()
            self._exactly(fields[10])
            self._pending = b""
            yield name

    def _skip_descriptor(self) -> None:
        """Go past what stands between a record's data and the next header: small records' own data, and sizes."""
        window = b""
        while not window.startswith((b"PK\x03\x04", b"PK\x01\x02")):
            window = window[1:] if len(window) >= 4 else window
            byte = self._file.read(1)
            if not byte:
                raise EOFError("it ends early")
            window += byte
        self._pending = window
