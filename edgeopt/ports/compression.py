"""What travels compressed: a file from an offset on, where a sample of it shrinks and the device can unpack it.

zstd where both sides have it, else gzip, which every device has. Offsets always count the file's own bytes, so that
an upload resumes wherever it was cut.
"""

from __future__ import annotations

import importlib.util
import zlib
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from edgeopt.errors import TransferError
from edgeopt.progress import Advance

SMALLEST_BYTES = 4096  # below, a packet is a packet
SAMPLES, SAMPLE_BYTES = 8, 64 << 10
CHUNK_BYTES = 1 << 20
AHEAD = 2  # chunks that are compressed while an earlier one is sent

# name -> the share of its size that a sample may keep for compressing to pay. gzip takes as long here as a fast
# network does for the bytes that it saves, so it must save more of them.
WORTH = {"zstd": 0.95, "gzip": 0.8}


def choose(path: Path, size: int, offset: int, programs: Iterable[str]) -> str | None:
    """How to send `path` from `offset` on: a key of WORTH that is among the device's `programs`, None for as it is."""
    method = next((m for m in WORTH if m in programs and _is_here(m)), None)
    if method is None or size - offset < SMALLEST_BYTES:
        return None
    return method if shrinks_to(path, size, offset, method) <= WORTH[method] else None


def shrinks_to(path: Path, size: int, offset: int, method: str) -> float:
    """The share of their size to which samples shrink, spread evenly over the file from `offset` to its end."""
    compress, finish = _compressor(method)
    step = max(SAMPLE_BYTES, (size - offset) // SAMPLES)
    before = after = 0
    with open(path, "rb") as f:
        for at in range(offset, size, step):
            f.seek(at)
            piece = f.read(SAMPLE_BYTES)
            before += len(piece)
            after += len(compress(piece))
    return (after + len(finish())) / before if before else 1.0


class Compressed:
    """`path` from `offset` on as a compressed stream to be read once; close it.

    `advance` is called with the file's bytes as they are handed out, `sent_bytes` counts the compressed ones. A thread
    compresses ahead of what is read.
    """

    def __init__(self, path: Path, offset: int, method: str, advance: Advance | None = None):
        self.name = str(path)
        self.sent_bytes = 0
        self._advance = advance
        self._source = open(path, "rb")  # noqa: SIM115  closed by close()
        self._source.seek(offset)
        self._compress, self._finish = _compressor(method)
        self._pool = ThreadPoolExecutor(1)
        self._coming: deque[Future[tuple[int, bytes, bool]]] = deque()
        self._held = memoryview(b"")
        self._over = False
        for _ in range(AHEAD):
            self._coming.append(self._pool.submit(self._next))

    def read(self, count: int) -> bytes:
        """At most `count` bytes; b"" at the end."""
        while not self._held and self._coming:
            taken, data, last = self._coming.popleft().result()
            if not last:
                self._coming.append(self._pool.submit(self._next))
            if self._advance is not None and taken:
                self._advance(taken)
            self._held = memoryview(data)
        piece, self._held = bytes(self._held[:count]), self._held[count:]
        self.sent_bytes += len(piece)
        return piece

    def close(self) -> None:
        """Let go of the file."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._source.close()

    def __enter__(self) -> Compressed:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def _next(self) -> tuple[int, bytes, bool]:
        """(bytes taken from the file, compressed bytes, whether it was the end). Called by one thread, in order."""
        if self._over:
            return 0, b"", True
        try:
            data = self._source.read(CHUNK_BYTES)
        except OSError as why:
            raise TransferError(f"cannot read the file here: {why.strerror}", where=self.name) from None
        if data:
            return len(data), self._compress(data), False
        self._over = True
        return 0, self._finish(), True


def _is_here(method: str) -> bool:
    return method == "gzip" or importlib.util.find_spec("zstandard") is not None


def _compressor(method: str) -> tuple[Callable[[bytes], bytes], Callable[[], bytes]]:
    """(compress a piece, finish), at the level that is fastest."""
    if method == "zstd":
        import zstandard

        zstd = zstandard.ZstdCompressor(level=1).compressobj()
        return zstd.compress, zstd.flush
    gzip = zlib.compressobj(level=1, wbits=31)
    return gzip.compress, gzip.flush
