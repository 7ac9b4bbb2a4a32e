"""The helpers of the CPU kernels: precision of the functions, products, threads."""

from collections import Counter
from itertools import pairwise, product

import numpy as np
import pytest
import torch
from numba import njit
from slow import slow_except

from transduce.kernels.simd import functions, int8
from transduce.kernels.simd import threads as threads_module
from transduce.kernels.simd.affine import BLOCK, PackedAffine
from transduce.kernels.simd.options import CONTRACT, VECTOR_BYTES
from transduce.kernels.simd.products import GROUP, multiply, multiply_packed, pack
from transduce.kernels.simd.threads import num_threads, shares_of, sharing, team

TYPES = [np.float32, np.float64]
compiled_here = njit(nogil=True, error_model="numpy", fastmath=CONTRACT)  # as the kernels are


# --- Functions of one number --------------------------------------------------------------------


def loop(function):
    @compiled_here
    def apply(numbers):
        results = np.empty_like(numbers)
        for i in range(numbers.size):
            results[i] = function(numbers[i])
        return results

    return apply


exp, log, log1p, sigmoid, tanh = map(
    loop,
    (functions.exp, functions.log, functions.log1p, functions.sigmoid, functions.tanh),
)


def exact_sigmoid(x):
    return 1 / (1 + np.exp(-x))


POINTS = 1_000_003
NEAR_ONE = np.linspace(0.5, 2, POINTS)
ALL_POSITIVE = np.geomspace(np.finfo(np.float32).tiny, np.finfo(np.float32).max, POINTS)
BOTH_SIGNS = np.linspace(-100, 100, POINTS)
NEAR_ZERO = np.concatenate([sign * np.geomspace(1e-30, 1, POINTS) for sign in (-1, 1)])


@pytest.mark.parametrize(
    "function, exact, numbers, relative, absolute",
    [
        (exp, np.exp, np.linspace(-87, 88, POINTS), 1.2e-7, 0),
        (log, np.log, ALL_POSITIVE, 1.2e-7, 0),
        (log, np.log, NEAR_ONE, 1.2e-7, 0),
        (log1p, np.log1p, np.linspace(0, 1, POINTS), 0, 1e-7),
        (sigmoid, exact_sigmoid, BOTH_SIGNS, 0, 1.2e-7),
        (tanh, np.tanh, BOTH_SIGNS, 0, 2e-7),
        (tanh, np.tanh, NEAR_ZERO, 2e-7, 0),
    ],
    ids=["exp", "log", "log near 1", "log1p", "sigmoid", "tanh", "tanh near 0"],
)
def test_function_is_exact_to_the_last_digits(function, exact, numbers, relative, absolute):
    narrow = numbers.astype(np.float32)
    actual, expected = function(narrow), exact(narrow.astype(np.float64))
    assert actual.dtype == np.float32
    assert np.all(np.abs(actual - expected) <= relative * np.abs(expected) + absolute)
    np.testing.assert_allclose(function(numbers), exact(numbers), rtol=1e-14, atol=1e-15)


@pytest.mark.parametrize(
    "function, x, y",
    [
        (exp, 0, 1),
        (exp, -np.inf, 0),
        (exp, -1e30, 0),
        (log, 1, 0),
        (log1p, 0, 0),
        (sigmoid, 0, 0.5),
        (sigmoid, np.inf, 1),
        (tanh, 0, 0),
        (tanh, np.inf, 1),
        (tanh, -np.inf, -1),
    ],
)
@pytest.mark.parametrize("dtype", TYPES)
def test_function_is_exact_at_the_ends(function, x, y, dtype):
    assert function(np.array([x], dtype))[0] == y


@pytest.mark.parametrize("x", [88.5, 1e30, np.inf])
def test_exp_does_not_overflow_in_float32(x):
    assert exp(np.array([x], np.float32))[0] == exp(np.array([88], np.float32))[0] < np.inf


@pytest.mark.parametrize("function", [exp, log, log1p, sigmoid, tanh])
def test_function_is_the_same_wherever_a_number_stands(function):
    numbers = np.linspace(0.01, 1, 77, dtype=np.float32)
    together = function(numbers)
    for i in range(77):
        assert function(numbers[i : i + 1])[0] == together[i]
        np.testing.assert_array_equal(function(numbers[i:]), together[i:])


# --- Products -----------------------------------------------------------------------------------


def random_matrix(rows, columns, dtype, seed=0):
    return np.random.default_rng(seed).standard_normal((rows, columns)).astype(dtype)


def inside(matrix):
    """Return a view of the matrix surrounded by NaN."""
    around = np.full((matrix.shape[0] + 3, matrix.shape[1] + 5), np.nan, matrix.dtype)
    around[1:-2, 2:-3] = matrix
    return around[1:-2, 2:-3]


VIEWS = {
    "plain": np.ascontiguousarray,
    "transposed": lambda matrix: np.ascontiguousarray(matrix.T).T,
    "a slice": inside,
    "a transposed slice": lambda matrix: inside(np.ascontiguousarray(matrix.T)).T,
    "every other": lambda matrix: np.repeat(np.repeat(matrix, 2, 0), 2, 1)[::2, ::2],
    "backwards": lambda matrix: np.ascontiguousarray(matrix[::-1, ::-1])[::-1, ::-1],
}
ALIKE = range(0, len(VIEWS) ** 2, len(VIEWS) + 1)  # pairs of the same view
# Rows, depth and columns around the sizes of a tile, a vector and a panel.
PRODUCTS = [
    (1, 1, 1), (1, 300, 1), (2, 0, 3), (6, 256, 16), (7, 257, 17), (5, 3, 15), (13, 600, 33),
    (12, 16, 64), (3, 512, 8), (40, 7, 100),
]  # fmt: skip


def assert_product(actual, a, b, added=0.0):
    """Assert that the product is exact up to the rounding of its sums."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    terms = np.abs(a) @ np.abs(b) + np.abs(added)
    bound = (a.shape[1] + 2) * np.finfo(actual.dtype).eps * terms
    assert np.all(np.abs(actual - (a @ b + added)) <= bound)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("view_a, view_b", slow_except(ALIKE, product(VIEWS, VIEWS)))
def test_multiply_takes_views_of_any_strides(view_a, view_b, accumulate, dtype):
    for rows, depth, columns in PRODUCTS:
        a, b = random_matrix(rows, depth, dtype), random_matrix(depth, columns, dtype, seed=1)
        around = np.full((rows + 2, columns + 3), np.nan if not accumulate else 0.5, dtype)
        before = around.copy()
        c = around[1:-1, 2:-1]
        multiply(VIEWS[view_a](a), VIEWS[view_b](b), c, accumulate)
        assert_product(c, a, b, 0.5 if accumulate else 0.0)
        c[:] = before[1:-1, 2:-1]
        np.testing.assert_array_equal(around, before)  # nothing else was written


@pytest.mark.parametrize("dtype", TYPES)
def test_a_row_of_a_product_is_the_same_whichever_stand_beside_it(dtype):
    a, b = random_matrix(20, 300, dtype), random_matrix(300, 50, dtype, seed=1)
    together = np.empty((20, 50), dtype)
    multiply(a, b, together, False)
    for rows in range(1, 20):
        c = np.empty((rows, 50), dtype)
        multiply(a[-rows:], b, c, False)
        np.testing.assert_array_equal(c, together[-rows:])


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("depth, columns", [(1, 1), (5, 16), (7, 17), (3, 50)])
def test_panels_hold_the_columns_side_by_side_and_zeros_after_them(depth, columns, dtype):
    lanes = VECTOR_BYTES // np.dtype(dtype).itemsize
    num_columns = -(-columns // lanes) * lanes + lanes
    matrix = random_matrix(depth, columns, dtype)
    packed = np.full(depth * num_columns, np.nan, dtype)
    pack(matrix, num_columns, packed)
    starts = range(0, num_columns, GROUP * lanes)
    widths = [min(GROUP * lanes, num_columns - start) for start in starts]
    groups = [
        packed[start * depth :][: width * depth].reshape(depth, width)
        for start, width in zip(starts, widths, strict=True)
    ]
    unpacked = np.concatenate(groups, 1)
    np.testing.assert_array_equal(unpacked[:, :columns], matrix)
    assert not unpacked[:, columns:].any()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("rows", range(1, 21))
def test_multiply_packed_is_the_product(rows, accumulate, dtype):
    lanes = VECTOR_BYTES // np.dtype(dtype).itemsize
    for depth, num_panels in [(1, 1), (33, 2), (300, 3), (64, 7), (20, 9)]:
        num_columns = num_panels * lanes
        a = random_matrix(rows + 2, depth, dtype)
        b = random_matrix(depth, num_columns, dtype, seed=1)
        c = np.full((rows + 2, num_columns), 0.5, dtype)
        packed = np.empty(depth * num_columns, dtype)
        pack(b, num_columns, packed)
        multiply_packed(a, rows, packed, num_columns, c, accumulate)
        assert_product(c[:rows], a[:rows], b, 0.5 if accumulate else 0.0)
        assert np.all(c[rows:] == 0.5)
        alone = np.full((1, num_columns), 0.5, dtype)
        multiply_packed(a[rows - 1 :], 1, packed, num_columns, alone, accumulate)
        np.testing.assert_array_equal(alone[0], c[rows - 1])


@pytest.mark.parametrize("rows", [1, BLOCK, 2 * BLOCK + 3])
def test_an_affine_layer_computes_each_row_by_itself(rows):
    layer = torch.nn.Linear(5, 11)
    x = torch.randn(rows, 5)
    found = PackedAffine(layer)(x)
    torch.testing.assert_close(found, layer(x).detach())
    assert torch.equal(found[-1:], PackedAffine(layer)(x[-1:]))


@pytest.mark.parametrize("rows", range(1, 21))
@pytest.mark.parametrize("accumulate", [False, True])
def test_a_product_with_int8_is_that_with_the_float32_weights_to_the_bit(accumulate, rows):
    generator = np.random.default_rng(rows)
    for depth, num_vectors in [(1, 1), (33, 2), (300, 3), (64, 4), (20, 9)]:
        num_columns = 16 * num_vectors
        integers = generator.integers(-127, 128, (depth, num_columns)).astype(np.int8)
        scales = np.exp2(generator.integers(-12, 3, num_columns)).astype(np.float32)
        a = random_matrix(rows, depth, np.float32)
        whole, found = np.full((2, rows, num_columns), 0.3, np.float32)
        packed, small = (np.empty(integers.size, kind) for kind in (np.float32, np.int8))
        pack(integers * scales, num_columns, packed)
        pack(integers, num_columns, small)
        multiply_packed(a, rows, packed, num_columns, whole, accumulate)
        multiply_packed(a, rows, small, num_columns, found, accumulate, scales)
        np.testing.assert_array_equal(found, whole)


# --- int8 -------------------------------------------------------------------------------------


def int8_weights(rows, columns, scales, most=127):
    """Return int8 numbers, with ±most in each row, and their products with the scales."""
    generator = np.random.default_rng(1)
    integers = generator.integers(-most, most + 1, (rows, columns)).astype(np.int8)
    integers[np.arange(rows), generator.integers(0, columns, rows)] = most
    return integers, integers * scales[:, None]


@pytest.mark.parametrize("most", [64, 65, 127])
def test_rows_that_are_int8_times_a_power_of_two_are_found_to_the_bit(most):
    scales = np.exp2(np.arange(-32, 33)).astype(np.float32)
    integers, weights = int8_weights(len(scales), 40, scales, most)
    integers[3] = weights[3] = 0
    found = int8.int8_rows(weights)
    np.testing.assert_array_equal(found[0], integers)
    np.testing.assert_array_equal(found[1][:3], scales[:3])
    np.testing.assert_array_equal(found[0] * found[1][:, None], weights)


@pytest.mark.parametrize("scale", [0.75, 2.0**-33, 2.0**33])
def test_rows_with_another_scale_stay_in_float32(scale):
    _, weights = int8_weights(3, 200, np.full(3, scale, np.float32))
    assert int8.int8_rows(weights) is None


@pytest.mark.parametrize("change", ["next", "-0", "nan", "inf", "-inf", "all infinite"])
def test_one_weight_of_another_form_keeps_all_rows_in_float32(change):
    scales = np.full(5, 2.0**-7, np.float32)
    integers, weights = int8_weights(5, 30, scales)
    assert int8.int8_rows(weights) is not None
    at = (2, int(np.argmin(np.abs(integers[2].astype(int) - 5))))
    if change == "all infinite":
        weights[2] = np.inf
    else:
        weights[at] = np.nextafter(weights[at], 9) if change == "next" else float(change)
    assert int8.int8_rows(weights) is None


def test_only_float32_is_held_in_int8():
    assert int8.int8_rows(np.full((2, 3), 127.0)) is None
    assert int8.int8_rows(np.full((2, 3), 127.0, np.float32)) is not None


# --- Threads ------------------------------------------------------------------------------------


@compiled_here
def add_up(share, starts, numbers, totals):
    for i in range(starts[share], starts[share + 1]):
        totals[share] += numbers[i]


share_sums = sharing(add_up)


@compiled_here
def sums(team, arguments):
    share_sums(team, arguments)


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("num_shares", [1, 2, 3, 8, 100])
def test_every_share_is_taken_once_by_any_threads(num_shares, threads, set_num_threads):
    set_num_threads(threads)
    starts = np.arange(num_shares + 1) * 7
    totals = np.zeros(num_shares)
    sums(team(num_shares), (starts, np.arange(7.0 * num_shares), totals))
    expected = np.arange(7.0 * num_shares).reshape(num_shares, 7).sum(1)
    np.testing.assert_array_equal(totals, expected)


def test_without_openmp_there_is_one_thread(monkeypatch):
    monkeypatch.setattr(threads_module, "openmp", lambda: None)
    monkeypatch.setattr(threads_module, "_openmp", threads_module._openmp.__wrapped__)
    assert num_threads() == 1


def test_there_are_as_many_threads_as_pytorch_has_or_one(set_num_threads):
    for threads in (1, 3):
        set_num_threads(threads)
        assert num_threads() in (threads, 1)


def test_one_share_or_one_thread_needs_no_team(set_num_threads):
    set_num_threads(2)
    assert team(1).tolist() == [1, 0, 0, 0]
    set_num_threads(1)
    assert team(4).tolist() == [4, 0, 0, 0]


COSTS = {
    "none": [],
    "one": [3],
    "free": [0, 0, 0],
    "equal": [5] * 12,
    "fewer than shares": [9, 4],
    "one dear": [100, 1, 1, 1, 1, 1],
    "random": np.random.default_rng(0).integers(1, 1000, 50).tolist(),
}


@pytest.mark.parametrize("num_shares", [1, 2, 3, 7])
@pytest.mark.parametrize("costs", COSTS.values(), ids=COSTS)
def test_shares_hold_each_item_once_and_cost_about_the_same(costs, num_shares):
    items, starts = shares_of(np.array(costs, np.int64), num_shares)
    assert Counter(items.tolist()) == Counter(range(len(costs)))
    assert starts[0] == 0 and starts[-1] == len(costs)
    assert np.all(np.diff(starts) > 0) or not costs
    assert len(starts) - 1 <= num_shares
    totals = [sum(costs[i] for i in items[a:b]) for a, b in pairwise(starts)]
    dearest = max(costs, default=0)
    assert max(totals) <= sum(costs) / num_shares + dearest  # as the greedy choice promises
    assert max(totals) - min(totals) <= dearest
