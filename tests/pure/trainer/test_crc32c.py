"""CRC-32C, against published values.

`tests/trainer/test_tfrecord.py` compares it with what TensorFlow writes.
"""

from __future__ import annotations

import pytest

from trainer.data import crc32c


@pytest.mark.parametrize(
    ("data", "expected"),
    [  # RFC 3720, section B.4.
        (b"", 0x00000000),
        (b"123456789", 0xE3069283),
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
    ],
)
def test_published_values(data: bytes, expected: int) -> None:
    assert crc32c.crc32c(data) == expected
