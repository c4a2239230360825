"""Wrappers of private Keras and TensorFlow API: the only package that touches any."""

from tfgpipe._compat.backend import check_keras_backend, check_tensorflow
from tfgpipe._compat.native_logging import native_logging_off, restore_stderr

__all__ = [
    "check_keras_backend",
    "check_tensorflow",
    "custom_gradients",
    "distributions",
    "eager_ops",
    "executed",
    "functions",
    "grappler",
    "keras_internals",
    "kernels",
    "native_logging_off",
    "restore_stderr",
    "sliced_variables",
    "spmd",
    "tf_internals",
    "tflite",
]
