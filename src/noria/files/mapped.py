"""A file mapped into memory, read through bounds that are checked: `MappedFile`.

Used by `noria.files.gguf` and `noria.files.safetensors`. It knows nothing about what the bytes mean, and it does not
guard against a file that another process shortens while it is mapped (replace model files by renaming, not in place).
"""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from noria.errors import ModelFileError


class MappedFile:
    """A read-only mapping of a whole file. It is released when the last array that views it is gone."""

    def __init__(self, path: Path) -> None:
        """Raises ModelFileError when the file cannot be opened or is empty."""
        self.path = path
        try:
            with path.open("rb") as file:
                self.size = file.seek(0, 2)
                if self.size == 0:
                    raise ModelFileError(f"{path} is empty; it was probably not copied or downloaded completely")
                self.bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise ModelFileError(f"cannot read {path}: {error.strerror or error}") from error

    def array(self, offset: int, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """`shape` values of `dtype` from `offset` bytes on: a read-only view, or a copy where the file misaligns it.

        The caller has checked that they lie inside the file.
        """
        dtype = np.dtype(dtype)
        count = int(np.prod(shape, dtype=np.int64))
        flat = np.frombuffer(self.bytes, dtype=dtype, count=count, offset=offset)
        view = flat.reshape(shape)
        return view if view.flags.aligned else view.copy()

    def rows(self, offset: int, num_rows: int, row_bytes: int) -> npt.NDArray[np.uint8]:
        """A read-only view of bytes, [num_rows, row_bytes]; the caller has checked that they lie inside the file."""
        return np.frombuffer(self.bytes, np.uint8, num_rows * row_bytes, offset).reshape(num_rows, row_bytes)
