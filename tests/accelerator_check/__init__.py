"""What holds on the accelerators of a machine: see `__main__.py`."""
