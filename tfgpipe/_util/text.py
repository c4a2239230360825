"""Tables as text, and numbers as people read them."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def text_table(
    header: Sequence[str], rows: Sequence[Sequence[str]], *, left: Collection[str]
) -> str:
    """Lays cells out in columns, those named in `left` to the left.

    >>> rows = [("0", "8"), ("1", "16")]
    >>> print(text_table(("stage", "bytes"), rows, left=("stage",)))
    stage  bytes
    0          8
    1         16
    """
    lines = [header, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if title in left else cell.rjust(width)
            for cell, width, title in zip(line, widths, header, strict=True)
        ).rstrip()
        for line in lines
    )


def layer_names(names: Sequence[str]) -> str:
    """Names layers in one cell: all of two, else the ends and remarks between.

    >>> layer_names(["a", "b"]), layer_names(["a", "b", "c"])
    ('a, b', 'a .. c (3)')
    >>> layer_names(["a", "b (of stage 0)", "c", "d"])
    'a .. b (of stage 0) .. d (4)'
    """
    if len(names) <= 2:
        return ", ".join(names)
    remarks = [name for name in names[1:-1] if " " in name]
    return " .. ".join([names[0], *remarks, names[-1]]) + f" ({len(names)})"


def readable_count(count: float) -> str:
    """Returns a number with three digits and the prefix of its size.

    >>> readable_count(950), readable_count(16_400), readable_count(1.68e11)
    ('950', '16.4 k', '168 G')
    """
    prefixes = ("", "k", "M", "G", "T", "P")
    power = 0
    while count >= 999.5 and power < len(prefixes) - 1:
        count, power = count / 1000, power + 1
    digits = 0 if power == 0 or count >= 99.95 else 1
    return f"{count:.{digits}f} {prefixes[power]}".rstrip()


def readable_bytes(count: float) -> str:
    """Returns a number of bytes as people read it.

    >>> readable_bytes(512), readable_bytes(67_108_864)
    ('512 B', '64.0 MiB')
    """
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    power = 0
    while count >= 1024 and power < len(units) - 1:
        count, power = count / 1024, power + 1
    return f"{count:.0f} B" if power == 0 else f"{count:.1f} {units[power]}"


def first_names(names: Sequence[str]) -> str:
    """Returns the first few names, and how many more there are."""
    first = ", ".join(f"'{name}'" for name in names[:3])
    return first + (f" and {len(names) - 3} more" if len(names) > 3 else "")
