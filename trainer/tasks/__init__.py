"""What is learnt: base classes of experiments, one module a task."""
