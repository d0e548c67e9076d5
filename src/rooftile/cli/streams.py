"""Standard streams that every command can use."""

from __future__ import annotations

import io
import os
import sys
from typing import TextIO


def prepare_streams() -> None:
    """No stream is missing (it is, where a parent closed it), and none fails on a character.

    A character that the terminal's encoding lacks is written as "?".
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115  (as long as the process)
        elif mode == "w" and isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def takes_unicode(stream: TextIO) -> bool:
    """Whether every character can be written; else JSON must escape them."""
    return (stream.encoding or "utf-8").lower().startswith("utf")
