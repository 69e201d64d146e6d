"""What a form holds: image files and a few settings, kept in memory and refused where they are not as agreed."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

from python_multipart.multipart import parse_options_header
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect, Request

FIELDS: dict[str, Callable[[str], Any]] = {
    "steps": int,
    "threshold": float,
    "latency_ms": float,
    "top": int,
    "tape": lambda text: {"0": False, "1": True}[text],
    "seen": lambda text: {"0": False, "1": True}[text],
}
WORDS: dict[str, str] = {"tape": "0 or 1", "seen": "0 or 1", "steps": "a whole number", "top": "a whole number"}
MOST_TEXT = 1024
CHARSETS = ("utf-8", "utf8", "us-ascii", "ascii", "iso-8859-1", "latin-1")

logging.getLogger("python_multipart").addHandler(logging.NullHandler())  # a line for each bad form would fill a disk


class File(NamedTuple):
    name: str
    content: bytes


class Form(NamedTuple):
    files: list[File]
    fields: dict[str, Any]


class _InMemory(MultiPartParser):
    """Never writes an upload to disk; the body limit bounds it."""

    spool_max_size = 1 << 62


async def read_form(request: Request, most_images: int) -> Form:
    kind = request.headers.get("content-type", "")
    if not kind.lower().startswith("multipart/form-data"):
        raise HTTPException(415, f"content type is {kind[:80]!r}; it must be multipart/form-data")
    _check_charset(kind)
    files: list[File] = []
    fields: dict[str, Any] = {}
    for name, value in await _items(request, most_images):
        if name == "image":
            if isinstance(value, str):
                raise HTTPException(422, "image is text; it must be a file")
            with value.file:
                files.append(File((value.filename or "image")[:80], value.file.read()))
        elif name not in FIELDS:
            raise HTTPException(422, f"{name[:40]!r} is no field; known are image, {', '.join(FIELDS)}")
        elif name in fields:
            raise HTTPException(422, f"{name} is given twice")
        else:
            fields[name] = _parsed(name, value)
    if not files:
        raise HTTPException(422, "image is missing; send one file or more")
    return Form(files, fields)


def _check_charset(kind: str) -> None:
    """Python knows encodings that fail in ways of their own, and some that are none of text."""
    given = parse_options_header(kind)[1].get(b"charset", b"utf-8").decode("latin-1")
    if given.lower() not in CHARSETS:
        raise HTTPException(415, f"charset is {given[:40]!r}; known are {', '.join(CHARSETS)}")


async def _items(request: Request, most_images: int) -> list[tuple[str, UploadFile | str]]:
    parser = _InMemory(
        request.headers, request.stream(), max_files=most_images, max_fields=len(FIELDS), max_part_size=MOST_TEXT
    )
    try:
        return (await parser.parse()).multi_items()
    except MultiPartException as error:
        most = f"; at most {most_images} images" if "files" in error.message else ""
        raise HTTPException(422, f"the form cannot be read: {error.message}{most}") from error
    except ClientDisconnect as error:
        raise HTTPException(400, "the upload was cut off") from error


def _parsed(name: str, value: UploadFile | str) -> Any:
    if not isinstance(value, str):
        raise HTTPException(422, f"{name} is a file; it must be {WORDS.get(name, 'a number')}")
    try:
        return FIELDS[name](value)
    except (ValueError, KeyError) as error:
        raise HTTPException(422, f"{name} is {value[:40]!r}; it must be {WORDS.get(name, 'a number')}") from error
