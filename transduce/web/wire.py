"""The binary format of a lattice: a header and arrays in the body of one response.

    4 bytes   n, the length of the header, an unsigned integer
    n bytes   JSON in UTF-8, padded with spaces so that the arrays begin at a multiple of 4 bytes
    the rest  float32 arrays, one after the other

All numbers are little endian. In the header, `arrays` lists [name, shape] in the order of the
arrays, which are in row-major order.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor


def pack(header: Mapping[str, Any], arrays: Mapping[str, Tensor]) -> bytes:
    """Return the bytes of a header and its arrays."""
    listed = [[name, list(array.shape)] for name, array in arrays.items()]
    text = json.dumps({**header, "arrays": listed}, ensure_ascii=False, allow_nan=False).encode()
    text += b" " * (-len(text) % 4)
    floats = [array.detach().numpy().astype("<f4").tobytes() for array in arrays.values()]
    return b"".join([struct.pack("<I", len(text)), text, *floats])


def unpack(content: bytes) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return the header and the arrays that `pack` wrote."""
    (length,) = struct.unpack_from("<I", content)
    header = json.loads(content[4 : 4 + length])
    arrays, start = {}, 4 + length
    for name, shape in header["arrays"]:
        count = int(np.prod(shape))
        arrays[name] = np.frombuffer(content, "<f4", count, start).reshape(shape)
        start += 4 * count
    return header, arrays
