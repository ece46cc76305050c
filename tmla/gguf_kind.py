"""Says what a file is that is not GGUF: an error page, a pointer, an older format, an unfinished download."""

from __future__ import annotations

import re
from typing import BinaryIO

_OLD_GGML = (b"GGML", b"GGMF", b"GGJT", b"GGLA", b"lmgg", b"fmgg", b"tjgg", b"algg", b"ggml", b"ggmf", b"ggjt", b"ggla")
_CHUNK = 1 << 16


def show(value: object, limit: int = 80) -> str:
    """Text for an error message: one line, printable, cut at `limit` characters."""
    text = _cut(str(value), limit)
    return text if text.isprintable() else repr(text)[1:-1]


def quote(value: object) -> str:
    """The same in quotation marks, for names that come from a file or a user."""
    return repr(_cut(str(value), 80))


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 3] + "..."


def raw_piece(name: str) -> str:
    """Hint for names that file splitters give (``x.gguf.part1of2``, ``x.gguf-split-a``), else nothing."""
    if re.search(r"(part-?\d+|\d+of\d+|split-\w+|\.gguf\.\d+|\.gguf[.-][a-z]{1,2})$", name):
        return " (the name looks like one piece of a plainly cut file: join all pieces with cat, in order)"
    if re.search(r"\.(part|partial|incomplete|crdownload|download|tmp|aria2)$", name):
        return " (the name looks like an unfinished download)"
    return ""


def not_gguf(head: bytes, size: int, f: BinaryIO) -> str:
    """One sentence about a file that does not begin like a GGUF file: what it is, what was expected, what to do.

    Parameters
    ----------
    head : bytes
        The first bytes, up to 4096.
    size : int
        Length of the file.
    f : file
        The file, open; read on only to see whether it begins with zeros, at most 64 KiB.
    """
    again = "download it again"
    if size == 0:
        return f"the file is empty (0 bytes), expected a GGUF file; {again}"
    if head[:4] in (b"GGUF", b"FUGG") or b"GGUF".startswith(head[:4]):
        if size >= 24:
            return f"begins with 'FUGG', a GGUF file with swapped bytes, expected 'GGUF'; {again}"
        return f"the file has only {size} bytes, expected at least a GGUF header (24 bytes); {again}"
    if not head.strip(b"\0"):
        f.seek(0)
        if not f.read(_CHUNK).strip(b"\0"):
            return f"begins with zeros, expected 'GGUF'; the download reserved its space but did not finish: {again}"
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    lower = text[:512].lower()
    if lower.startswith(b"version https://git-lfs") or b"git-lfs" in lower[:64]:
        wanted = re.search(rb"^size (\d{1,20})\s*$", text, re.M)
        stands = f" that stands for {wanted.group(1).decode()} bytes" if wanted else ""
        return f"is a Git LFS pointer{stands}, expected the model itself; run git lfs pull, or download the file"
    if lower.startswith((b"<!doctype html", b"<html", b"<head", b"<body")) or b"<html" in lower:
        return "is an HTML page, expected 'GGUF'; the download link led to a web page: use the link of the file itself"
    if lower.startswith((b"<?xml", b"<error", b"<!doctype")):
        return f"is an XML document (often a server's error message), expected 'GGUF'; {again}"
    if head[:4] in _OLD_GGML:
        return (
            f"begins with {quote(head[:4].decode())}, a format older than GGUF (2023), expected 'GGUF'; "
            "convert the original model again, or get a newer file"
        )
    if head[8:9] == b"{" and head[:8].endswith(b"\0\0\0"):
        return "is a safetensors file, expected 'GGUF'; convert the model with llama.cpp's convert_hf_to_gguf.py"
    for magic, what in _MAGICS:
        if head.startswith(magic):
            return f"is {what}, expected 'GGUF'; {again if 'archive' not in what else 'unpack it, or ' + again}"
    if _is_text(head):
        return f"is a text file that begins with {quote(text[:40].decode(errors='replace'))}, expected 'GGUF'; {again}"
    return (
        f"begins with bytes {head[:4].hex(' ')}, expected 47 47 55 46 ('GGUF'); "
        f"this is no GGUF file, or a damaged one: {again}{raw_piece(getattr(f, 'name', '') or '')}"
    )


_MAGICS = (
    (b"PK\x03\x04", "a ZIP archive or PyTorch checkpoint"),
    (b"\x1f\x8b", "a gzip archive"),
    (b"\x28\xb5\x2f\xfd", "a zstd archive"),
    (b"\xfd7zXZ", "an xz archive"),
    (b"BZh", "a bzip2 archive"),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive"),
    (b"\x89HDF", "an HDF5 file"),
    (b"\x80\x02", "a Python pickle (an old PyTorch checkpoint)"),
    (b"%PDF", "a PDF document"),
)


def _is_text(head: bytes) -> bool:
    try:
        head.decode("utf-8")
    except UnicodeDecodeError as error:
        if error.start < len(head) - 4:  # else a character cut in half by the end of `head`
            return False
    return not any(b < 9 or 13 < b < 27 for b in head)
