"""Analysis, rewriting and splitting of traced graphs; it knows no layers."""

__all__ = [
    "batch_cuts",
    "eager_run",
    "flops",
    "joint_graph",
    "multi_device",
    "partitioner",
    "passes",
    "peak_memory",
    "reader",
    "recomputation",
]
