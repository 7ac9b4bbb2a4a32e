"""Matrix products whose sums stay in registers: a tile of LLVM vector instructions.

The private kernels take addresses instead of arrays, so that one compilation serves views of all
strides. `like` is any array of the numbers' type, `stored` of the type that b is stored in: the
same, or int8. Strides count numbers, not bytes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba import config, types
from numba.core import cgutils

from transduce.kernels.simd.options import VECTOR_BYTES, compiled, intrinsic

# Rows of a tile: more use each loaded weight more often, until the registers are full. 6 x 2 sums,
# 2 weights and 1 broadcast fill 15 of AVX2's 16.
MAX_ROWS = 6
# Terms of one pass over a sum: more passes read and write the sums more often, but a panel of
# DEPTH x 64 bytes = 16 KiB stays in the first-level cache.
DEPTH = 256
# Vectors of b that lie side by side in packed memory, so that a tile of so many reads them in turn.
GROUP = 4
# AVX-512 has registers for the sums of MAX_ROWS x GROUP vectors, which read less than narrow tiles.
_FEATURES = getattr(config, "CPU_FEATURES", None) or binding.get_host_cpu_features().flatten()
HAS_WIDE_TILES = "+avx512f" in _FEATURES


@intrinsic
def noinline(typing_context):
    """Forbid LLVM to inline the function that calls this: alone it is optimised better."""

    def codegen(context, builder, signature, args):
        builder.function.attributes.add("noinline")
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def _address(typing_context, array):
    def codegen(context, builder, signature, args):
        data = context.make_array(array)(context, builder, args[0]).data
        return builder.ptrtoint(data, context.get_value_type(types.intp))

    return types.intp(array), codegen


@intrinsic
def _load(typing_context, like, address):
    def codegen(context, builder, signature, args):
        number = context.get_data_type(like.dtype)
        return builder.load(builder.inttoptr(args[1], number.as_pointer()))

    return like.dtype(like, types.intp), codegen


@intrinsic
def _store(typing_context, like, address, value):
    def codegen(context, builder, signature, args):
        number = context.get_data_type(like.dtype)
        builder.store(args[2], builder.inttoptr(args[1], number.as_pointer()))
        return context.get_dummy_value()

    return types.void(like, types.intp, like.dtype), codegen


def _tile(rows: int, columns: int) -> Any:
    """Return an intrinsic that computes c = a b or c += a b for one tile, its sums in registers.

    The tile is `rows` rows of a times `columns` vectors of b. Row r of a at depth k is at offset
    r * a_row + k * a_depth; vector j of b at depth k begins at j * b_column + k * b_depth; the
    results of row r are contiguous from r * c_row. Where b is int8, the sums are multiplied by the
    scales of its columns at their end. Scales are powers of two, which change no rounding, so that
    the results are those of float32 weights to the bit.
    """

    @intrinsic
    def tile(
        typing_context, like, stored, a, a_row, a_depth, b, b_column, b_depth, scales, depth,
        c, c_row, accumulate,
    ):  # fmt: skip
        signature = types.void(like, stored, *[types.intp] * 10, types.boolean)

        def codegen(context, builder, signature, args):
            number = context.get_data_type(like.dtype)
            size = context.get_abi_sizeof(number)  # also the alignment, as rows begin anywhere
            lanes = VECTOR_BYTES // size
            vector = ir.VectorType(number, lanes)
            is_int8 = stored.dtype == types.int8
            stored_number = context.get_data_type(stored.dtype)
            stored_vector = ir.VectorType(stored_number, lanes)
            fma_type = ir.FunctionType(vector, [vector] * 3)
            fma_name = f"llvm.fma.v{lanes}f{8 * size}"
            fma = cgutils.get_or_insert_function(builder.module, fma_type, fma_name)

            def count(n):
                return context.get_constant(types.intp, n)

            def at(address, steps, stride, kind):
                """Return a pointer to the number or vector `steps` strides after `address`."""
                of = kind.element if isinstance(kind, ir.VectorType) else kind
                bytes_each = count(context.get_abi_sizeof(of))
                numbers = builder.mul(builder.mul(steps, stride), bytes_each)
                return builder.inttoptr(builder.add(address, numbers), kind.as_pointer())

            def splat(x):
                undefined = ir.Constant(vector, ir.Undefined)
                mask = ir.Constant(ir.VectorType(ir.IntType(32), lanes), [0] * lanes)
                one = builder.insert_element(undefined, x, ir.Constant(ir.IntType(32), 0))
                return builder.shuffle_vector(one, undefined, mask)

            def offset(address, steps, stride, kind):
                return builder.ptrtoint(at(address, count(steps), stride, kind), address.type)

            def weight(address, step):
                """Return a vector of b as numbers, without scales."""
                pointer = at(address, step, b_depth, stored_vector)
                if not is_int8:
                    return builder.load(pointer, align=size)
                wide = ir.VectorType(ir.IntType(8 * size), lanes)
                integers = builder.sext(builder.load(pointer, align=1), wide)
                return builder.sitofp(integers, vector)

            def total(cell, column):
                """Return the sums of one vector of results."""
                if not is_int8:
                    return builder.load(cell)
                pointer = at(scales, count(column), count(lanes), vector)
                return builder.fmul(builder.load(cell), builder.load(pointer, align=size))

            _, _, a, a_row, a_depth, b, b_column, b_depth, scales, depth, c, c_row, accumulate = (
                args
            )
            a_rows = [offset(a, r, a_row, number) for r in range(rows)]
            b_columns = [offset(b, j, b_column, stored_number) for j in range(columns)]
            # LLVM keeps these in registers, because their addresses do not escape.
            zero = ir.Constant(vector, [0.0] * lanes)
            sums = [
                [cgutils.alloca_once(builder, vector) for _ in range(columns)] for _ in range(rows)
            ]
            for cells in sums:
                for cell in cells:
                    builder.store(zero, cell)
            with cgutils.for_range(builder, depth) as loop:
                weights = [weight(column, loop.index) for column in b_columns]
                for row, cells in zip(a_rows, sums, strict=True):
                    x = splat(builder.load(at(row, loop.index, a_depth, number)))
                    for w, cell in zip(weights, cells, strict=True):
                        builder.store(builder.call(fma, [x, w, builder.load(cell)]), cell)
            for r, cells in enumerate(sums):
                row = offset(c, r, c_row, number)
                for j, cell in enumerate(cells):
                    pointer = at(row, count(j), count(lanes), vector)
                    with builder.if_else(accumulate) as (then, otherwise):
                        with then:
                            old = builder.load(pointer, align=size)
                            new = builder.fadd(old, total(cell, j))
                            builder.store(new, pointer, align=size)
                        with otherwise:
                            builder.store(total(cell, j), pointer, align=size)
            return context.get_dummy_value()

        return signature, codegen

    return tile


_tile_1, _tile_2, _tile_3, _tile_4, _tile_5, _tile_6 = (_tile(rows, 1) for rows in range(1, 7))
_tile_1_by_2, _tile_2_by_2 = _tile(1, 2), _tile(2, 2)
_tile_1_by_4, _tile_2_by_4, _tile_3_by_4, _tile_4_by_4, _tile_5_by_4, _tile_6_by_4 = (
    _tile(rows, 4) for rows in range(1, 7)
)


@compiled
def _rows_by_vector(rows, operands):
    """Multiply up to MAX_ROWS rows of a by one vector of b."""
    noinline()
    if rows == 6:
        _tile_6(*operands)
    elif rows == 5:
        _tile_5(*operands)
    elif rows == 4:
        _tile_4(*operands)
    elif rows == 3:
        _tile_3(*operands)
    elif rows == 2:
        _tile_2(*operands)
    elif rows == 1:
        _tile_1(*operands)


@compiled
def _rows_by_group(rows, operands):
    """Multiply up to MAX_ROWS rows of a by GROUP vectors of b."""
    noinline()
    if rows == 6:
        _tile_6_by_4(*operands)
    elif rows == 5:
        _tile_5_by_4(*operands)
    elif rows == 4:
        _tile_4_by_4(*operands)
    elif rows == 3:
        _tile_3_by_4(*operands)
    elif rows == 2:
        _tile_2_by_4(*operands)
    elif rows == 1:
        _tile_1_by_4(*operands)


@compiled
def pack(matrix, num_columns, packed):
    """Copy a matrix [depth, columns] into groups [depth, GROUP, lanes], the last of fewer vectors.

    `num_columns` is a multiple of the lanes; columns past those of the matrix become zero. The
    matrix has the numbers of the product, or int8 in place of float32.
    """
    depth, columns = matrix.shape
    lanes = VECTOR_BYTES // max(matrix.itemsize, 4)
    packed[:] = 0
    for first in range(0, columns, GROUP * lanes):
        wide = min(GROUP * lanes, num_columns - first)
        for k in range(depth):
            at = first * depth + k * wide
            for column in range(min(wide, columns - first)):
                packed[at + column] = matrix[k, first + column]


@compiled
def multiply_packed(a, rows, packed, num_columns, c, accumulate, scales=None):
    """Compute c[:rows] = a[:rows] b, or +=, for few rows and a packed b, which is read once.

    Rows of a and c are contiguous. One row alone is bound by the loads of b, so it takes a whole
    group of vectors at once. If b was packed from int8, `scales` [num_columns] are those of its
    columns, powers of two.
    """
    noinline()
    depth, size = a.shape[1], a.itemsize
    a_row = a.strides[0] // size
    lanes = VECTOR_BYTES // size
    num_vectors = num_columns // lanes
    like, stored = np.empty(0, a.dtype), np.empty(0, packed.dtype)
    scales_at = 0 if scales is None else _address(scales)
    for first in range(0, num_vectors, GROUP):
        # All rows take a group before the next one, while it is in the cache.
        group = min(GROUP, num_vectors - first)
        b_depth = group * lanes
        row = 0
        while row < rows:
            left = rows - row
            tall = min(left, MAX_ROWS)
            if MAX_ROWS < left < 2 * MAX_ROWS:
                tall = (left + 1) // 2  # 7 as 4 + 3: one row alone is the slowest
            a_at = _address(a) + row * a_row * size
            j = 0
            while j < group:
                b_at = _address(packed) + (first * depth + j) * lanes * packed.itemsize
                s_at = scales_at + (first + j) * lanes * size
                c_at = _address(c) + (row * num_columns + (first + j) * lanes) * size
                operands = (
                    like, stored, a_at, a_row, 1, b_at, lanes, b_depth, s_at, depth,
                    c_at, num_columns, accumulate,
                )  # fmt: skip
                if group == GROUP and (HAS_WIDE_TILES or tall == 1):
                    _rows_by_group(tall, operands)
                    j += GROUP
                elif tall == 1 and j + 2 <= group:
                    _tile_1_by_2(*operands)
                    j += 2
                elif tall == 2 and j + 2 <= group:
                    _tile_2_by_2(*operands)
                    j += 2
                else:
                    _rows_by_vector(tall, operands)
                    j += 1
            row += tall


@compiled
def _multiply(
    like, rows, depth, columns, a, a_row, a_depth, b, b_row, b_column, c, c_row, accumulate
):  # fmt: skip
    """Compute c = a b, or c += a b, for all rows and columns and at most DEPTH terms."""
    noinline()
    size = like.itemsize
    lanes = VECTOR_BYTES // size
    panel = np.empty(depth * lanes, like.dtype)
    edge = np.empty(MAX_ROWS * lanes, like.dtype)
    for j in range(0, columns, lanes):
        width = min(lanes, columns - j)
        whole = width == lanes
        b_at, b_depth = b + j * b_column * size, b_row
        if not whole or b_column != 1:  # whole contiguous vectors of b are read in place
            for k in range(depth):
                for column in range(lanes):
                    value = panel.dtype.type(0)
                    if column < width:
                        value = _load(like, b_at + (k * b_row + column * b_column) * size)
                    panel[k * lanes + column] = value
            b_at, b_depth = _address(panel), lanes
        for row in range(0, rows, MAX_ROWS):
            tall = min(MAX_ROWS, rows - row)
            a_at, c_at = a + row * a_row * size, c + (row * c_row + j) * size
            of_tile = (like, like, a_at, a_row, a_depth, b_at, 0, b_depth, 0, depth)
            if whole:
                _rows_by_vector(tall, (*of_tile, c_at, c_row, accumulate))
                continue
            _rows_by_vector(tall, (*of_tile, _address(edge), lanes, False))
            for r in range(tall):
                for column in range(width):
                    value, place = edge[r * lanes + column], c_at + (r * c_row + column) * size
                    _store(like, place, value + _load(like, place) if accumulate else value)


@compiled
def multiply(a, b, c, accumulate):
    """Compute c = a b, or c += a b, for views of any strides; rows of c are contiguous."""
    rows, depth = a.shape
    columns = b.shape[1]
    size = a.itemsize
    a_row, a_depth = a.strides[0] // size, a.strides[1] // size
    b_row, b_column = b.strides[0] // size, b.strides[1] // size
    like = np.empty(0, a.dtype)
    if depth == 0 and not accumulate:
        c[:] = 0
    for k in range(0, depth, DEPTH):
        _multiply(
            like, rows, min(DEPTH, depth - k), columns,
            _address(a) + k * a_depth * size, a_row, a_depth,
            _address(b) + k * b_row * size, b_row, b_column,
            _address(c), c.strides[0] // size, accumulate or k > 0,
        )  # fmt: skip
