"""The versions with which the private names were checked.

If a contract test fails after an upgrade, that name has moved: read the docstring of
the function that uses it, find the new place, and change that function alone.
"""

from __future__ import annotations

import keras
import tensorflow as tf

CHECKED = "TensorFlow 2.21, Keras 3.15"
MOVED = f"worked with {CHECKED}; here TensorFlow {tf.__version__}, Keras "
MOVED += keras.__version__

# Of layers of attention: Keras 3.14 has none.
WINDOW = {"sliding_window": 3} if keras.version() >= "3.15" else {}
