"""What a request must respect, checked before the engine's loop ever sees it."""

from __future__ import annotations

from dataclasses import dataclass

from rooftile.engine.params import BeamSearchParams, Params


@dataclass(frozen=True)
class Limits:
    """Of a model, and of the engine that runs it."""

    vocab_size: int
    max_model_len: int
    kv_tokens: int  # that KV memory keeps
    max_num_seqs: int

    def check(self, prompt_ids: list[int], params: Params) -> None:
        """Refuse what can never run.

        Raises:
            ValueError: an empty or too long prompt, a token id outside the vocabulary, n too large.
        """
        if not prompt_ids:
            raise ValueError("the prompt is empty; give at least one token")
        for token in prompt_ids:
            if (
                not isinstance(token, int)
                or isinstance(token, bool)
                or not (0 <= token < self.vocab_size)
            ):
                raise ValueError(
                    f"prompt token id {token!r} is outside the vocabulary 0..{self.vocab_size - 1}"
                )
        length = len(prompt_ids)
        most = self.max_model_len if params.max_tokens == 0 else self.max_model_len - 1
        if length > most:
            room = "" if params.max_tokens == 0 else ", which leaves room for one new token"
            raise ValueError(
                f"the prompt has {length} tokens; with max_model_len {self.max_model_len} it may "
                f"have at most {most}{room}"
            )
        if length > self.kv_tokens:
            raise ValueError(
                f"the prompt has {length} tokens, but all KV memory holds {self.kv_tokens}; "
                f"raise num_pages or kv_memory_share"
            )
        if isinstance(params, BeamSearchParams):
            name, rows = "width", params.width
        else:
            name, rows = "n", params.n
            params.check_vocabulary(self.vocab_size)
        if rows > self.max_num_seqs:
            raise ValueError(f"{name} is {rows}; the engine runs max_num_seqs {self.max_num_seqs}")
