"""Arithmetic and comparison of Arrow columns in stored form, exact as ``kivi.model.expressions`` defines it.

Decimals come as int64 of their unscaled values, timestamps as int64 of microseconds. Arrow's own kernels do the work as
long as nothing is out of range; only then it is found out in which rows, by NumPy. One of two operands may be a scalar.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from kivi.model.types import ColumnType

__all__ = [
    "COMPARE",
    "calculated_floats",
    "calculated_integers",
    "compared",
    "exact_floats",
    "floats",
    "rescaled",
    "within",
]

Array = npt.NDArray[Any]
Result = tuple[Any, Array | None]
"""The column, null where a result is out of range, and where that is; None: nowhere."""

COMPARE: Final[dict[str, Callable[[Any, Any], Any]]] = {
    "==": pc.equal,
    "!=": pc.not_equal,
    "<": pc.less,
    "<=": pc.less_equal,
    ">": pc.greater,
    ">=": pc.greater_equal,
}
_CHECKED: Final[dict[str, Callable[[Any, Any], Any]]] = {
    "+": pc.add_checked,
    "-": pc.subtract_checked,
    "*": pc.multiply_checked,
}
_FLOAT: Final[dict[str, Callable[[Any, Any], Any]]] = {
    "+": pc.add,
    "-": pc.subtract,
    "*": pc.multiply,
    "/": pc.divide,
}


_EXACT: Final = 2**53
"""Integers up to it, either way, are float64 numbers."""

# -- integers -----------------------------------------------------------------------------------------------


def calculated_integers(op: str, left: Any, right: Any) -> Result:
    """int64 + - * int64."""
    try:
        return _CHECKED[op](left, right), None
    except pa.ArrowInvalid:
        out, bad = _FLOAT[op](left, right), _overflows(op, _numbers(left), _numbers(right))
    bad = bad & _known(out)
    return _without(out, bad), bad


def _overflows(op: str, a: Array, b: Array) -> Array:
    """Where the wrapped result of 64 bits is not the result."""
    with np.errstate(over="ignore"):
        if op == "*":
            product, divisor = a * b, np.where(a == 0, 1, a)
            low = np.iinfo(np.int64).min
            return np.asarray(((a == -1) & (b == low)) | ((a != 0) & (a != -1) & (product // divisor != b)))
        out = a + b if op == "+" else a - b
    return np.asarray(((a ^ out) & ((b ^ out) if op == "+" else (a ^ b))) < 0)


def rescaled(values: Any, digits: int) -> Result:
    """Unscaled values at a scale of so many digits more."""
    return calculated_integers("*", values, pa.scalar(10**digits, pa.int64())) if digits else (values, None)


def within(type_: ColumnType, values: Any, bad: Array | None) -> Result:
    """The decimals that have at most their type's digits, the moments that a datetime holds."""
    beyond = pc.or_(pc.less(values, type_.stored_min), pc.greater(values, type_.stored_max))
    if not pc.any(beyond).as_py():
        return values, bad
    found = np.atleast_1d(np.asarray(beyond.fill_null(False)))
    return _without(values, found), found if bad is None else bad | found


# -- floats -------------------------------------------------------------------------------------------------


def floats(type_: ColumnType, values: Any) -> Any:
    """A number in stored form as float64."""
    if type_.name == "float64":
        return values
    out = values.cast(pa.float64(), safe=False)
    return pc.divide(out, 10.0**type_.scale) if type_.scale else out


def exact_floats(type_: ColumnType, values: Any) -> Any | None:
    """A number in stored form as float64, if that is exactly what each of them is; None if it may not be."""
    if type_.name == "float64":
        return values
    if type_.scale:
        return None
    if isinstance(values, pa.Scalar):
        low = high = values.as_py()
    elif values.null_count or not len(values):
        low, high = pc.min_max(values).as_py().values()
    else:  # Arrow's kernel takes as long for some thousands
        numbers = values.to_numpy()
        low, high = numbers.min(), numbers.max()
    return floats(type_, values) if low is None or (low >= -_EXACT and high <= _EXACT) else None


def calculated_floats(op: str, left: Any, right: Any) -> Result:
    """float64 + - * / float64; a divisor of 0 gives null."""
    if op == "/":
        right = pc.if_else(pc.equal(right, 0.0), pa.scalar(None, pa.float64()), right)
    out = pc.add(_FLOAT[op](left, right), 0.0)  # -0.0 + 0.0 is 0.0
    if isinstance(out, pa.Array) and not out.null_count and np.isfinite(out.to_numpy()).all():
        return out, None
    finite = pc.is_finite(out)
    if pc.all(finite).as_py() is not False:
        return out, None
    bad = np.atleast_1d(np.asarray(pc.invert(finite).fill_null(False)))
    return _without(out, bad), bad


# -- comparisons --------------------------------------------------------------------------------------------


def compared(op: str, left: Any, left_type: ColumnType, right: Any, right_type: ColumnType) -> Any:
    """The two columns compared, numbers of any two types exactly."""
    a_float, b_float = left_type.name == "float64", right_type.name == "float64"
    if a_float == b_float and left_type.scale == right_type.scale:
        return COMPARE[op](left, right)
    valid = pc.and_(pc.is_valid(left), pc.is_valid(right))
    a, b = _numbers(left), _numbers(right)
    if b_float:
        signs = _beside_floats(a, left_type.scale, b)
    elif a_float:
        signs = -_beside_floats(b, right_type.scale, a)
    elif left_type.scale < right_type.scale:
        signs = _at_scales(a, b, right_type.scale - left_type.scale)
    else:
        signs = -_at_scales(b, a, left_type.scale - right_type.scale)
    found = COMPARE[op](pa.array(np.atleast_1d(signs)), 0)
    return pc.if_else(valid, found, pa.scalar(None, pa.bool_()))


def _at_scales(a: Array, b: Array, digits: int) -> Array:
    """The sign of a * 10**digits - b, which need not fit in 64 bits."""
    whole, rest = np.divmod(b, 10**digits)
    return np.where(a == whole, -(rest > 0).astype(np.int8), np.where(a < whole, np.int8(-1), np.int8(1)))


def _beside_floats(unscaled: Array, scale: int, numbers: Array) -> Array:
    """The sign of unscaled / 10**scale - number, exactly: by rounded values (within 2.3e-16) where these are apart."""
    unscaled, numbers = np.broadcast_arrays(unscaled, numbers)
    rounded = unscaled.astype(np.float64) / 10.0**scale
    apart = rounded - numbers
    signs = np.sign(apart).astype(np.int8)
    close = np.flatnonzero(np.abs(apart) <= np.abs(rounded) * 1e-15)
    if len(close):
        signs[close] = _exact_signs(unscaled[close], scale, numbers[close])
    return signs


def _exact_signs(unscaled: Array, scale: int, numbers: Array) -> Array:
    """The sign of unscaled / 10**scale - number.

    The whole parts decide, both cut towards 0, or else the fractions: an integer v, the rest of unscaled / 10**scale,
    and the fraction of the number times 10**scale. That product is a sum of two floats, high and low, without an error
    (Veltkamp 1968, Dekker 1971). v and the parts of high are multiples of the last place of high, and low is less than
    that, so a rounded difference of the former compares with low as the exact one does.
    """
    above, below = numbers >= 2.0**63, numbers < -(2.0**63)
    usable = np.where(above | below, 0.0, numbers)
    cut = np.trunc(usable)
    number = cut.astype(np.int64)
    v = np.fmod(unscaled, 10**scale)
    whole = (unscaled - v) // 10**scale
    high, low = _product(usable - cut, 10.0**scale)
    cut_high = np.trunc(high)
    gap = (v - cut_high.astype(np.int64)).astype(np.float64) - (high - cut_high)
    fraction = np.where(gap == low, np.int8(0), np.where(gap < low, np.int8(-1), np.int8(1)))
    signs = np.where(whole == number, fraction, np.where(whole < number, np.int8(-1), np.int8(1)))
    return np.where(above, np.int8(-1), np.where(below, np.int8(1), signs))


def _product(a: Array, b: float) -> tuple[Array, Array]:
    """a * b as a rounded product and its error."""
    high = a * b
    a_high, a_low = _halves(a)
    b_high, b_low = _halves(np.float64(b))
    return high, a_low * b_low - (((high - a_high * b_high) - a_low * b_high) - a_high * b_low)


def _halves(a: Any) -> tuple[Any, Any]:
    large = a * 134_217_729.0  # 2**27 + 1
    high = large - (large - a)
    return high, a - high


# -- helpers ------------------------------------------------------------------------------------------------


def _numbers(values: Any) -> Array:
    """As NumPy, 0 where it is null; of a scalar one number."""
    if isinstance(values, pa.Scalar):
        known = values.as_py()
        return np.asarray(0 if known is None else known, np.float64 if pa.types.is_floating(values.type) else np.int64)
    filled = values.fill_null(0) if values.null_count else values
    return filled.to_numpy(zero_copy_only=False)  # type: ignore[no-any-return]


def _known(values: Any) -> Array:
    return values.is_valid().to_numpy(zero_copy_only=False)  # type: ignore[no-any-return]


def _without(values: Any, bad: Array) -> Any:
    return pc.if_else(pa.array(bad), pa.scalar(None, values.type), values)
