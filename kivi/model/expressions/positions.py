"""``within_km``: positions in degrees, and distances of great circles on a sphere of 6371.0088 km (the mean radius).

The formula is the haversine's, with phi the latitudes and lambda the longitudes::

    h = sin((phi - phi0) / 2)**2 + cos(phi) * cos(phi0) * sin((lambda - lambda0) / 2)**2
    within, if h <= sin(km / (2 * 6371.0088))**2

On the ellipsoid that the Earth is nearer to, distances differ by up to 0.6 %. A latitude beyond 90 degrees and a
longitude beyond 360 are no position: that is unknown, as null is.

**Invariant.** One position and a column of them give the same answer, bit for bit. The sines of libraries do not
promise that, so sines are polynomials here: only + - * and the remainder, which IEEE 754 defines to the last bit, of
Python's numbers and of NumPy's columns alike. They are exact to 1e-15, which is less than a micrometre.
"""

from __future__ import annotations

import math
from typing import Any, Final

from kivi.errors import InvalidArgument
from kivi.model.json_texts import as_float
from kivi.model.types import shown

__all__ = ["checked_circle", "haversine", "haversine_max", "is_position", "is_within", "latitudes", "longitudes"]

Circle = tuple[float, float, float]
"""Latitude, longitude, and km."""

_RADIUS_KM: Final = 6371.0088
_HALF_WAY_KM: Final = _RADIUS_KM * math.pi
_DEGREE: Final = math.pi / 180
_LAT_MAX, _LON_MAX = 90.0, 360.0
_SLACK: Final = 1e-9
"""Degrees, 0.1 mm: bounds are so much wider than the circle, whatever is rounded."""
_SINE: Final = [(-1) ** n / math.factorial(2 * n + 1) for n in reversed(range(13))]
_COSINE: Final = [(-1) ** n / math.factorial(2 * n) for n in reversed(range(14))]


def checked_circle(value: tuple[Any, ...]) -> Circle:
    """Raises InvalidArgument for what is none."""
    given: list[Any] = [each for each in value if isinstance(each, (int, float)) and not isinstance(each, bool)]
    numbers: list[Any] = [as_float(each) for each in given]
    if len(value) != 3 or len(numbers) != 3 or not all(type(each) is float and math.isfinite(each) for each in numbers):
        raise InvalidArgument(
            f"within_km takes a latitude, a longitude and kilometres, which are numbers, not {shown(value)}"
        )
    lat, lon, km = numbers
    if abs(lat) > _LAT_MAX or abs(lon) > _LON_MAX or km < 0:
        raise InvalidArgument(
            f"within_km: latitudes lie within -90 and 90, longitudes within -360 and 360, and kilometres are not less "
            f"than 0: {lat}, {lon}, {km} are none"
        )
    return lat, lon, km


def is_within(lat: float, lon: float, circle: Circle) -> bool | None:
    """None: it is no position."""
    if not is_position(lat, lon):
        return None
    return bool(haversine(lat, lon, circle) <= haversine_max(circle))


def is_position(lat: Any, lon: Any) -> Any:
    """Of numbers, or of columns of them."""
    return (abs(lat) <= _LAT_MAX) & (abs(lon) <= _LON_MAX)


def haversine(lat: Any, lon: Any, circle: Circle) -> Any:
    """h, of a position or of columns of them."""
    at_lat, at_lon, _ = circle
    across = _sine((lat - at_lat) * 0.5)
    along = _sine(((lon - at_lon + 180.0) % 360.0 - 180.0) * 0.5)
    return across * across + _cosine(lat) * _cosine(at_lat) * (along * along)


def haversine_max(circle: Circle) -> float:
    """The greatest h within a circle."""
    half = _sine(min(circle[2], _HALF_WAY_KM) / (2 * _RADIUS_KM) / _DEGREE)
    return float(half * half)


def _sine(degrees: Any) -> Any:
    """From -90 to 90."""
    x = degrees * _DEGREE
    return x * _horner(_SINE, x * x)


def _cosine(degrees: Any) -> Any:
    """From -90 to 90."""
    x = degrees * _DEGREE
    return _horner(_COSINE, x * x)


def _horner(coefficients: list[float], x: Any) -> Any:
    out: Any = coefficients[0]
    for coefficient in coefficients[1:]:
        out = out * x + coefficient
    return out


# -- bounds -------------------------------------------------------------------------------------------------


def latitudes(circle: Circle) -> tuple[float, float]:
    """The least and the greatest latitude within a circle, or a little beyond."""
    lat, _, km = circle
    reach = km / _RADIUS_KM / _DEGREE + _SLACK
    return max(lat - reach, -_LAT_MAX), min(lat + reach, _LAT_MAX)


def longitudes(circle: Circle) -> list[tuple[float, float]]:
    """Ranges of longitudes, from -360 to 360, that a circle lies in; empty: in all of them."""
    lat, lon, km = circle
    reach = km / _RADIUS_KM
    if reach + abs(lat) * _DEGREE >= math.pi / 2 - 1e-6:  # it has a pole
        return []
    half = math.asin(min(1.0, math.sin(reach) / math.cos(lat * _DEGREE))) / _DEGREE + _SLACK
    turns = [(lon - half + turn, lon + half + turn) for turn in (-720.0, -360.0, 0.0, 360.0, 720.0)]
    return [(max(low, -_LON_MAX), min(high, _LON_MAX)) for low, high in turns if low <= _LON_MAX and high >= -_LON_MAX]
