"""Run compiled kernels in PyTorch's threads.

Two thread pools compete for the cores: after each parallel operation PyTorch's threads spin for
milliseconds, waiting for the next one, so that Numba's own would get half a core. The kernels
therefore run in PyTorch's threads, through the GNU OpenMP entry points that its library links to.
Where there are none (macOS, Windows) one thread takes all shares in turn.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils

from transduce.kernels.openmp import openmp
from transduce.kernels.simd.options import intrinsic


@cache
def _openmp() -> tuple[int, int, int]:
    """Return the addresses of GOMP_parallel, omp_get_thread_num, omp_get_num_threads, or zeros."""
    if (library := openmp()) is None:
        return 0, 0, 0
    names = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")
    parallel, thread, team = (ctypes.cast(library[name], ctypes.c_void_p) for name in names)
    return parallel.value or 0, thread.value or 0, team.value or 0


def num_threads() -> int:
    """Return the number of PyTorch's threads, or 1 if kernels cannot run in them."""
    return torch.get_num_threads() if _openmp()[0] else 1


def team(num_shares: int) -> np.ndarray:
    """Return the `team` of a `sharing` function: the number of shares and OpenMP's addresses.

    One share alone runs in the calling thread: a forked process, such as a worker of PyTorch's data
    loader, has only one thread and must not wait for those of its parent.
    """
    addresses = _openmp() if num_shares > 1 and torch.get_num_threads() > 1 else (0, 0, 0)
    return np.array([num_shares, *addresses])


def sharing(kernel: Any) -> Any:
    """Return a function of (team, arguments) that calls kernel(i, *arguments) for every share i.

    It outlines the loop over a thread's shares into a C function and passes that to OpenMP, as a
    compiler does, so that it allocates nothing and needs no interpreter.
    """

    @intrinsic
    def share(typing_context, team, arguments):
        kernel_type = typing_context.resolve_value_type(kernel)
        call = kernel_type.get_call_type(typing_context, (types.intp, *arguments.types), {})
        compiled_kernel = kernel_type.dispatcher.get_compile_result(call)

        def codegen(context, builder, signature, args):
            integer, pointer = ir.IntType(64), ir.IntType(8).as_pointer()
            context.active_code_library.add_linking_library(compiled_kernel.library)
            values = context.make_array(team)(context, builder, args[0]).data
            num_shares, parallel, thread_number, team_size = (
                builder.load(builder.gep(values, [integer(i)])) for i in range(4)
            )
            fields = [num_shares, thread_number, team_size, args[1]]
            frame_type = ir.LiteralStructType([field.type for field in fields])
            frame = cgutils.alloca_once(builder, frame_type)
            for i, field in enumerate(fields):
                builder.store(field, cgutils.gep_inbounds(builder, frame, 0, i))

            outline_type = ir.FunctionType(ir.VoidType(), [pointer])
            name = builder.module.get_unique_name(f"{builder.function.name}.share")
            outline = ir.Function(builder.module, outline_type, name)
            outline.linkage = "internal"
            inside = ir.IRBuilder(outline.append_basic_block())
            data = inside.bitcast(outline.args[0], frame_type.as_pointer())
            num_shares, thread_number, team_size, values = (
                inside.load(cgutils.gep_inbounds(inside, data, 0, i)) for i in range(4)
            )

            def ask(address):
                question = ir.FunctionType(ir.IntType(32), []).as_pointer()
                return inside.sext(inside.call(inside.inttoptr(address, question), []), integer)

            alone = inside.icmp_signed("==", thread_number, integer(0))
            first, step = (cgutils.alloca_once(inside, integer) for _ in range(2))
            with inside.if_else(alone) as (then, otherwise):
                with then:
                    inside.store(integer(0), first)
                    inside.store(integer(1), step)
                with otherwise:
                    inside.store(ask(thread_number), first)
                    inside.store(ask(team_size), step)
            shares = cgutils.for_range_slice(
                inside, inside.load(first), num_shares, inside.load(step), integer
            )
            with shares as (i, _):
                unpacked = [inside.extract_value(values, j) for j in range(len(arguments.types))]
                context.call_internal_no_propagate(
                    inside, compiled_kernel.fndesc, call, [i, *unpacked]
                )
            inside.ret_void()

            data = builder.bitcast(frame, pointer)
            with builder.if_else(builder.icmp_signed("==", parallel, integer(0))) as (then, other):
                with then:
                    builder.call(outline, [data])
                with other:
                    flags = ir.IntType(32)
                    entry = ir.FunctionType(
                        ir.VoidType(), [outline_type.as_pointer(), pointer, flags, flags]
                    )
                    count = builder.trunc(fields[0], flags)
                    start = builder.inttoptr(parallel, entry.as_pointer())
                    builder.call(start, [outline, data, count, flags(0)])
            return context.get_dummy_value()

        return types.void(team, arguments), codegen

    return share


def shares_of(costs: np.ndarray, num_shares: int) -> tuple[np.ndarray, np.ndarray]:
    """Divide the items 0, 1, ... into shares of similar cost (longest processing time first).

    Return the items of all shares, one share after the other, and the index of each share's first.
    """
    num_shares = max(1, min(num_shares, len(costs)))
    by_cost = np.argsort(-costs, kind="stable")
    if num_shares == 1:
        return by_cost, np.array([0, len(costs)])
    shares: list[list[int]] = [[] for _ in range(num_shares)]
    totals = [0.0] * num_shares
    for item in by_cost.tolist():
        least = totals.index(min(totals))
        shares[least].append(item)
        totals[least] += float(costs[item])
    shares = [share for share in shares if share]  # items that cost nothing all go to one share
    return np.concatenate(shares).astype(np.int64), np.cumsum([0, *map(len, shares)])
