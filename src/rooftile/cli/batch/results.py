"""The output of a long run: whole lines, appended as they are made, and taken up again later.

A record tells the line it answers and that line's digest: in Rooftile's own format in fields of
their own, in that of an OpenAI batch within its `id`.
"""

from __future__ import annotations

import fcntl
import json
import re
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any

from rooftile.cli.batch.lines import Line, Scan

# Which JSON allows within a string, and readers such as Python's splitlines take for the end of one.
LINE_ENDS = {0x85: "\\u0085", 0x2028: "\\u2028", 0x2029: "\\u2029"}
OPENAI_ID = re.compile(r"batch_req_([0-9]{1,18})_([0-9a-f]{16})")


def openai_id(line: Line) -> str:
    return f"batch_req_{line.number}_{line.digest}"


@dataclass
class Earlier:
    """What earlier runs have left. done: a flag per line of the input, from line 1."""

    done: bytearray
    num_done: int = 0
    num_failed: int = 0


class OutputFile:
    """Locked while it is open, so that two runs cannot mix. Nothing changes before `begin`."""

    def __init__(self, path: Path, overwrite: bool) -> None:
        """Raises: ValueError for what is no regular file, or is being written by another run."""
        if path.exists() and not path.is_dir() and not path.is_file():
            raise ValueError(f"--output {path} is no regular file; results are kept in one")
        self._path = path
        self._overwrite = overwrite
        self._keep = 0  # bytes of whole records
        self._file = path.open("ab", buffering=0)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise ValueError(f"another run is writing to {path}; wait for it") from None
        except OSError:  # a file system without locks
            pass

    def __enter__(self) -> OutputFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._file.close()

    def earlier(self, scan: Scan) -> Earlier:
        """The lines that need not run again. A last line without its end does not count.

        Raises:
            ValueError: the file has something else than results of this input.
        """
        found = Earlier(bytearray(len(scan.digests)))
        if self._overwrite:
            return found
        with self._path.open("rb") as file:
            for at, raw in enumerate(file, start=1):
                if not raw.endswith(b"\n"):
                    break
                self._keep += len(raw)
                number, digest, failed = self._key(raw, at)
                if number > len(scan.digests) or scan.digests[number - 1] != digest:
                    raise ValueError(
                        f"{self._path} has results of another input, model or options (line {at} "
                        f"does not answer line {number} of this input); give another --output, "
                        f"or --overwrite to lose them"
                    )
                if not found.done[number - 1]:
                    found.done[number - 1] = 1
                    found.num_done += 1
                    found.num_failed += failed
        return found

    def _key(self, raw: bytes, at: int) -> tuple[int, int, bool]:
        """Line number, digest, and whether the record is one of a failure."""
        try:
            record = json.loads(raw)
            if isinstance(record["id"], str) and "custom_id" in record:
                match = OPENAI_ID.fullmatch(record["id"])
                number, digest = match.groups() if match else (0, "")
            else:
                number, digest = record["line"], record["digest"]
            key = int(number), int(digest, 16), record["error"] is not None
            if key[0] < 1:
                raise ValueError
            return key
        except (ValueError, TypeError, LookupError):
            raise ValueError(
                f"{self._path}, line {at} is no result of `rooftile generate`; give another "
                f"--output, or --overwrite to lose what is there"
            ) from None

    def begin(self) -> None:
        """Cut off a half-written last line; with overwrite, everything."""
        self._file.truncate(self._keep)

    def write(self, record: dict[str, Any]) -> None:
        """Raises: ValueError when the disk takes no more."""
        try:
            line = json.dumps(record, ensure_ascii=False).translate(LINE_ENDS).encode() + b"\n"
        except UnicodeEncodeError:  # an id may hold half a surrogate pair
            line = json.dumps(record).encode() + b"\n"
        try:
            write_all(self._file, line)
        except OSError as error:
            raise ValueError(
                f"cannot write to {self._path}: {error.strerror}; once that is put right, the "
                f"same command goes on from here"
            ) from error


def write_all(file: FileIO, line: bytes) -> None:
    while line:
        line = line[file.write(line) :]
