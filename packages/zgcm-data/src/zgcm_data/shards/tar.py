"""The bytes of a shard: an ustar archive in which every row is two adjacent members.

``KEY.tokens.bin`` (uint32 little-endian, T + 1 ids) is followed by ``KEY.docs.bin`` (int64 little-endian,
``[n, 4]``); KEY is the global row index in 12 digits. Owner, time and mode are fixed, so the same rows give
the same bytes. The layout is that of POSIX.1-1988 ustar, which WebDataset, DALI and any tar program read.
"""

from functools import cache

BLOCK = 512
KEY_DIGITS = 12
TOKENS_SUFFIX = "tokens.bin"
DOCS_SUFFIX = "docs.bin"
END_OF_ARCHIVE = bytes(2 * BLOCK)
_MAX_ROWS = 10**KEY_DIGITS
_SIZE = slice(124, 136)
_CHECKSUM = slice(148, 156)


def padded(size: int) -> int:
    """Round a member's size up to whole blocks."""
    return -(-size // BLOCK) * BLOCK


def key(row: int) -> str:
    """Return a row's key, its global index in 12 digits.

    Raises:
        ValueError: the index does not fit.
    """
    if not 0 <= row < _MAX_ROWS:
        raise ValueError(f"row {row} does not fit in {KEY_DIGITS} digits; split the set")
    return f"{row:0{KEY_DIGITS}d}"


@cache
def _template(suffix: str, size: int) -> tuple[bytes, bytes, int]:
    header = bytearray(BLOCK)
    name = b"0" * KEY_DIGITS + b"." + suffix.encode()
    header[: len(name)] = name
    header[100:108] = b"0000644\0"
    header[108:116] = header[116:124] = b"0000000\0"
    header[_SIZE] = b"%011o\0" % size
    header[136:148] = b"%011o\0" % 0
    header[_CHECKSUM] = b" " * 8
    header[156:157] = b"0"
    header[257:265] = b"ustar\x0000"
    return bytes(header[KEY_DIGITS:148]), bytes(header[156:]), sum(header)


def header(row_key: str, suffix: str, size: int) -> bytes:
    """Return the header block of one member.

    Args:
        row_key: from ``key``.
        suffix: ``TOKENS_SUFFIX`` or ``DOCS_SUFFIX``.
        size: bytes of the member.
    """
    before, after, base = _template(suffix, size)
    name = row_key.encode()
    checksum = base + sum(name) - KEY_DIGITS * ord("0")
    return name + before + b"%06o\0 " % checksum + after


def member(row_key: str, suffix: str, data: bytes) -> bytes:
    """Return one whole member: header, data, and zeros to the end of the block."""
    return header(row_key, suffix, len(data)) + data + bytes(padded(len(data)) - len(data))
