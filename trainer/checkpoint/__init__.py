"""Checkpoints: when and where, their files, the names in them, weights from others."""
