"""Output that follows a grammar: which tokens may come next, as a logits processor.

A `Grammar` follows one text; a `GrammarProcessor` keeps those of a request's samples. What it sends
to another process is the specification alone, which is compiled where the engine runs.
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from rooftile.engine.beginnings import common_length
from rooftile.engine.token_bytes import TokenBytes
from rooftile.models.tokenizer import Tokenizer

if TYPE_CHECKING:
    from torch import Tensor

MOST_COMPILED = 64  # grammars that are kept for the next request that has them
MOST_FOLLOWED = 64  # texts that one request follows before it re-reads some from their beginning
# Models that may write any number of spaces between two values like to go on doing so.
MOST_SPACES = 4
# JSON has them in strings as escapes only, which the backend forgets where a length is limited.
CONTROL = re.compile(rb"[\x00-\x09\x0b\x0c\x0e-\x1f]")
SOURCE_PLACE = re.compile(r"^\[[\d:]+\] \S+: ")  # in the backend's messages


class Grammar(Protocol):
    """Follows one text token by token."""

    def mask(self) -> Tensor:
        """[vocab] bool: the tokens that may come next."""

    def advance(self, token_id: int) -> None:
        """Raises: ValueError for a token that may not come next."""

    def rollback(self, count: int) -> None:
        """Take the last `count` tokens back."""


@dataclass(frozen=True)
class JsonSpec:
    """JSON of a schema (as JSON text). strict: properties that the schema does not name are not
    allowed even where it does not say so."""

    schema: str
    strict: bool = False


ANY_OBJECT = JsonSpec('{"type": "object"}')


class GrammarCompiler:
    """Makes grammars of specifications, for one vocabulary. May be used from several threads."""

    def __init__(
        self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: frozenset[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._lock = threading.Lock()  # of what is kept, and never held for long
        self._compiling = threading.Lock()
        self._backend: Any = None
        self._compiled: OrderedDict[JsonSpec, Any] = OrderedDict()

    def compile(self, spec: JsonSpec) -> Callable[[], Grammar]:
        """A maker of grammars that begin at the start of a text.

        Raises:
            ValueError: a schema that is not valid, or asks for what the backend cannot do.
            NotImplementedError: the package xgrammar is not installed.
        """
        compiled = self._kept(spec)
        if compiled is None:
            with self._compiling:
                compiled = self._kept(spec) or self._compile(spec)
            with self._lock:
                self._compiled[spec] = compiled
                if len(self._compiled) > MOST_COMPILED:
                    self._compiled.popitem(last=False)
        return lambda: self._grammar(compiled)

    def keeps(self, spec: JsonSpec) -> bool:
        """Whether it was compiled lately, so that `compile` takes no time."""
        return self._kept(spec) is not None

    def _kept(self, spec: JsonSpec) -> Any:
        with self._lock:
            compiled = self._compiled.get(spec)
            if compiled is not None:
                self._compiled.move_to_end(spec)
            return compiled

    def _grammar(self, compiled: Any) -> Grammar:
        return _XGrammar(compiled, self._vocab_size, self._eos_token_ids)

    def _make_backend(self) -> Any:
        try:
            import xgrammar
        except ImportError as error:
            raise NotImplementedError(
                f"output in JSON needs the package xgrammar: pip install 'rooftile[grammar]' ({error})"
            ) from None
        token_bytes = TokenBytes(self._tokenizer)
        special = self._tokenizer.special_ids
        vocabulary = [
            b"" if token in special or CONTROL.search(token_bytes[token]) else token_bytes[token]
            for token in range(self._vocab_size)
        ]
        info = xgrammar.TokenizerInfo(
            vocabulary,
            xgrammar.VocabType.RAW,
            vocab_size=self._vocab_size,
            stop_token_ids=sorted(self._eos_token_ids),
        )
        return xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def _compile(self, spec: JsonSpec) -> Any:
        if self._backend is None:
            self._backend = self._make_backend()
        try:
            compiled = self._backend.compile_json_schema(
                spec.schema, strict_mode=spec.strict, max_whitespace_cnt=MOST_SPACES
            )
        except Exception as error:  # the backend raises several kinds
            lines = str(error).strip().splitlines() or [type(error).__name__]
            reason = SOURCE_PLACE.sub("", lines[-1])
            raise ValueError(f"the JSON schema cannot be used: {reason[:200]}") from None
        if not self._grammar(compiled).mask().any():
            raise ValueError("the JSON schema cannot be used: no text can ever follow it")
        return compiled


class _XGrammar:
    """A Grammar by xgrammar's matcher."""

    def __init__(self, compiled: Any, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        import xgrammar

        self._matcher = xgrammar.GrammarMatcher(compiled)
        self._words = xgrammar.allocate_token_bitmask(1, vocab_size)  # [1, vocab / 32] int32
        self._vocab_size = vocab_size
        self._eos_token_ids = sorted(eos_token_ids)

    def mask(self) -> Tensor:
        if self._matcher.is_terminated():  # nothing but further ends of the text
            allowed = torch.zeros(self._vocab_size, dtype=torch.bool)
            allowed[self._eos_token_ids] = True
            return allowed
        self._matcher.fill_next_token_bitmask(self._words)
        bits = (self._words[0, :, None] >> torch.arange(32)) & 1  # [vocab / 32, 32]
        return bits.flatten()[: self._vocab_size].bool()

    def advance(self, token_id: int) -> None:
        if self._matcher.is_terminated() and token_id in self._eos_token_ids:
            raise ValueError("the text has ended")
        if not self._matcher.accept_token(token_id):
            raise ValueError(f"token {token_id} does not follow the grammar")

    def rollback(self, count: int) -> None:
        self._matcher.rollback(count)


class GrammarProcessor:
    """A logits processor that leaves only the tokens that its specification allows.

    It is told a sample's whole output each time, so it takes up whichever of its grammars has
    followed most of it. Pickled, it is its specification; `bind` compiles it again.
    """

    def __init__(self, spec: JsonSpec) -> None:
        self.spec = spec
        self._make: Callable[[], Grammar] | None = None
        self._followed: dict[tuple[int, ...], Grammar] = {}  # by what each has read

    def __getstate__(self) -> JsonSpec:
        return self.spec

    def __setstate__(self, spec: JsonSpec) -> None:
        self.__init__(spec)  # type: ignore[misc]

    def bind(self, compiler: GrammarCompiler) -> None:
        """Raises: what `GrammarCompiler.compile` does."""
        self._make = compiler.compile(self.spec)

    def __call__(self, output_ids: Sequence[int], logits: Tensor) -> Tensor:
        mask = self._follow(tuple(output_ids)).mask().to(logits.device)
        return logits.masked_fill(~mask, float("-inf"))

    def _follow(self, output_ids: tuple[int, ...]) -> Grammar:
        """The grammar that has read exactly these tokens."""
        if self._make is None:
            raise RuntimeError("the grammar was not compiled before its request began")
        followed = self._followed
        # As a rule one has read all but the last; only where samples part is it to be looked for.
        read: tuple[int, ...] | None = next(
            (known for known in (output_ids, output_ids[:-1]) if known in followed), None
        )
        if read is None:
            read = max(followed, key=lambda known: common_length(known, output_ids), default=None)
        common = 0 if read is None else common_length(read, output_ids)
        others_need_it = common < len(output_ids) - 1
        if read is None or (others_need_it and len(followed) < MOST_FOLLOWED):
            grammar, common = self._make(), 0
        else:
            grammar = followed.pop(read)
            if common < len(read):
                grammar.rollback(len(read) - common)
        for token in output_ids[common:]:
            grammar.advance(token)
        followed[output_ids] = grammar
        return grammar


def has_grammar(processor: Any) -> bool:
    """Whether one of a chain of processors follows a grammar."""
    return any(True for _ in _grammars(processor))


def bind_grammars(processor: Any, compiler: GrammarCompiler | None) -> None:
    """Compile the grammars in a chain of processors. Raises: what `GrammarCompiler.compile` does."""
    for grammar in _grammars(processor):
        if compiler is None:
            raise ValueError("output in JSON needs a tokenizer, which this model does not have")
        grammar.bind(compiler)


def _grammars(processor: Any) -> Iterator[GrammarProcessor]:
    while processor is not None:
        if isinstance(processor, GrammarProcessor):
            yield processor
        processor = getattr(processor, "then", None)
