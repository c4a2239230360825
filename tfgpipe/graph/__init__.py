"""Analysis and splitting of traced TensorFlow graphs; it knows nothing of stages."""

__all__ = [
    "eager_run",
    "fake_quant",
    "flops",
    "fusion",
    "matmul",
    "memory",
    "multi_device",
    "partitioner",
    "reader",
]
