"""The names that the package offers."""

from __future__ import annotations

import tfgpipe


def test_every_public_name_resolves_and_is_documented() -> None:
    without = [name for name in tfgpipe.__all__ if not getattr(tfgpipe, name).__doc__]
    assert not without
