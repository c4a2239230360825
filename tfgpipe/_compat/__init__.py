"""Wrappers of private Keras and TensorFlow API: the only package that touches any."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tfgpipe._util import lazy_exports

if TYPE_CHECKING:
    from tfgpipe._compat import eager_ops as eager_ops
    from tfgpipe._compat import executed as executed
    from tfgpipe._compat import functions as functions
    from tfgpipe._compat import grappler as grappler
    from tfgpipe._compat import keras_internals as keras_internals
    from tfgpipe._compat import kernels as kernels
    from tfgpipe._compat import spmd as spmd
    from tfgpipe._compat import tf_internals as tf_internals
    from tfgpipe._compat import tflite as tflite
    from tfgpipe._compat import tpu_variables as tpu_variables
    from tfgpipe._compat.backend import check_keras_backend as check_keras_backend
    from tfgpipe._compat.backend import check_tensorflow as check_tensorflow
    from tfgpipe._compat.distributions import TENSORFLOWS as TENSORFLOWS
    from tfgpipe._compat.distributions import (
        installed_tensorflows as installed_tensorflows,
    )
    from tfgpipe._compat.native_logging import native_logging_off as native_logging_off
    from tfgpipe._compat.native_logging import restore_stderr as restore_stderr

__all__, __getattr__, __dir__ = lazy_exports(__name__)
