"""Bundles of device values whose fields are listed once.

    @record
    class Fill:
        stage: gl.tensor
        phase: gl.tensor

    at = Fill(stage, phase)          # in a kernel; at.stage, at.phase, at's jitted methods

Triton's aggregates want a constructor that assigns every field. This one is written from the
annotations, as text, since Triton hashes the constructor's source into the key of compiled kernels.
"""

import linecache
from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from typing_extensions import dataclass_transform

from rooftile.kernels.triton_version import aggregate


@dataclass_transform()
def record(cls: Any) -> Any:
    """The aggregate of `cls` with a constructor that takes its fields in order."""
    fields = cls.__annotations__
    lines = [f"def __init__(self, {', '.join(fields)}):\n"]
    for name, kind in fields.items():
        value = f"gl.constexpr({name})" if kind is gl.constexpr else name
        lines.append(f"    self.{name} = {value}\n")
    source = "".join(lines)
    filename = f"<fields of {cls.__module__}.{cls.__qualname__}>"
    linecache.cache[filename] = (len(source), None, lines, filename)
    namespace: dict[str, Any] = {"gl": gl, "__name__": cls.__module__}
    exec(compile(source, filename, "exec"), namespace)
    cls.__init__ = gluon.constexpr_function(namespace["__init__"])
    return aggregate(cls)
