"""Shapes of TPU slices."""

from __future__ import annotations

# Slices as TPUs have them: v3-8, v4-8, v4-32, v5e-16.
SLICES = {
    "v3-8": (2, 2, 1, 2),
    "v4-8": (2, 2, 1, 1),
    "v4-32": (2, 2, 4, 1),
    "v5e-16": (4, 4, 1, 1),
}
