"""The colours of sensitivities, which are the same in the figures and in the explorer.

Equal steps in value are equal steps in lightness; the hue goes from indigo over red to yellow. In
grey, and to readers with colour blindness, larger values are lighter.
"""

from __future__ import annotations

import numpy as np

NUM_COLOURS = 256
# Sensitivities are shown relative to the largest, on a logarithmic scale of so many powers of ten.
# More show weaker influences; fewer tell strong ones apart better.
DECADES = 3


def heat_colours() -> np.ndarray:
    """Return the colours from the smallest to the largest value, [NUM_COLOURS, 3], in 0 to 255."""
    x = np.linspace(0, 1, NUM_COLOURS)
    lightness, hue = 0.16 + 0.81 * x, np.radians(285 + 175 * x**0.9)
    chroma = 0.03 + 0.19 * np.sin(np.pi * np.minimum(1, 0.06 + 0.86 * x)) ** 0.9
    linear = _linear_rgb(lightness, chroma, hue)
    while (outside := ((linear < -0.001) | (linear > 1.001)).any(1)).any():
        chroma[outside] -= 0.002  # the screen lacks the colour; take a duller one
        linear = _linear_rgb(lightness, chroma, hue)
    linear = linear.clip(0, 1)
    encoded = np.where(linear <= 0.0031308, 12.92 * linear, 1.055 * linear ** (1 / 2.4) - 0.055)
    colours: np.ndarray = np.rint(255 * encoded).astype(np.uint8)
    return colours


def _linear_rgb(lightness: np.ndarray, chroma: np.ndarray, hue: np.ndarray) -> np.ndarray:
    """Convert OKLCH [N] each to linear sRGB [N, 3], which may lie outside of [0, 1]."""
    a, b = chroma * np.cos(hue), chroma * np.sin(hue)
    cones = np.stack(
        (
            lightness + 0.3963377774 * a + 0.2158037573 * b,
            lightness - 0.1055613458 * a - 0.0638541728 * b,
            lightness - 0.0894841775 * a - 1.2914855480 * b,
        )
    )
    to_rgb = np.array(
        [
            [4.0767416621, -3.3077115913, 0.2309699292],
            [-1.2684380046, 2.6097574011, -0.3413193965],
            [-0.0041960863, -0.7034186147, 1.7076147010],
        ]
    )
    rgb: np.ndarray = (to_rgb @ cones**3).T
    return rgb
