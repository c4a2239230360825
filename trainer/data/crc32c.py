"""CRC-32C, the checksum of TFRecord files, by table look-ups in numpy.

A CRC without its constants is linear: that of `left + right` is the CRC of `left`,
moved on by as many zeros as `right` is long, xor that of `right`. So the bytes' own
CRCs are joined in pairs, the pairs in pairs, and n bytes take log2(n) steps in numpy.
"""

from __future__ import annotations

import functools

import numpy as np

_POLYNOMIAL = 0x82F63B78  # Castagnoli's, lowest bit first.
_ONES = 0xFFFFFFFF
# Bytes for which a loop is faster than numpy.
_SHORT = 64


def crc32c(data: bytes) -> int:
    """Returns the checksum of some bytes.

    >>> hex(crc32c(b"123456789"))
    '0xe3069283'
    """
    if len(data) < _SHORT:
        crc = _ONES
        for byte in data:
            crc = _plain_table()[(crc ^ byte) & 0xFF] ^ crc >> 8
        return crc ^ _ONES
    return _of_long(data)


def _of_long(data: bytes) -> int:
    steps = (len(data) - 1).bit_length()
    # Zeros in front change nothing, and make the length a power of two.
    padded = np.zeros(1 << steps, np.uint8)
    padded[-len(data) :] = np.frombuffer(data, np.uint8)
    crc = _bytes()[padded]
    for step in reversed(range(steps)):
        left, right = np.split(crc, 2)
        crc = _moved(left, step) ^ right
    start = np.array([_ONES], np.uint32)
    for step in range(len(data).bit_length()):
        if len(data) >> step & 1:
            start = _moved(start, step)
    return int(crc[0] ^ start[0]) ^ _ONES


def masked(data: bytes) -> int:
    """Returns the checksum as TFRecord files store it: rotated, with a constant added.

    A checksum of data that holds checksums would be a poor one otherwise.
    """
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & _ONES


@functools.cache
def _bytes() -> np.ndarray:
    """Returns the CRC of each byte, `[256]`."""
    crc: np.ndarray = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        crc = (crc >> 1) ^ (crc & 1) * np.uint32(_POLYNOMIAL)
    return crc


@functools.cache
def _plain_table() -> list[int]:
    return [int(crc) for crc in _bytes()]


@functools.cache
def _tables(step: int) -> np.ndarray:
    """Returns what each byte of a CRC becomes, moved on by 2^step zeros, `[4, 256]`."""
    each = np.arange(256, dtype=np.uint32)
    crcs = np.stack([each << np.uint32(8 * byte) for byte in range(4)])
    if step == 0:
        return (crcs >> np.uint32(8)) ^ _bytes()[crcs & 0xFF]
    return _moved(_moved(crcs, step - 1), step - 1)


def _moved(crcs: np.ndarray, step: int) -> np.ndarray:
    """Returns CRCs moved on by 2^step zero bytes."""
    tables = _tables(step)
    return (
        tables[0][crcs & 0xFF]
        ^ tables[1][crcs >> 8 & 0xFF]
        ^ tables[2][crcs >> 16 & 0xFF]
        ^ tables[3][crcs >> 24]
    )
