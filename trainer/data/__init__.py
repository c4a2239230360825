"""Data: text, images and pairs of texts, as batches that depend on their step alone."""
