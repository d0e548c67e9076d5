"""Beam search equals Hugging Face transformers', in a batch with other requests, and shares pages."""

from __future__ import annotations

import pytest
import torch
import transformers

from rooftile.engine.llm import LLM
from rooftile.engine.params import BeamSearchParams, SamplingParams

EOS = [3, 7]


@pytest.fixture(scope="module")
def peer(tmp_path_factory: pytest.TempPathFactory) -> tuple[transformers.LlamaForCausalLM, str]:
    """A random model of 40 tokens, two of which end a text, so that beams end all the time."""
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
        bos_token_id=1, eos_token_id=EOS, initializer_range=0.3,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    directory = tmp_path_factory.mktemp("beam")
    model.save_pretrained(directory)
    return model, str(directory)


def expected(
    model: transformers.LlamaForCausalLM, prompt: list[int], params: BeamSearchParams
) -> list[tuple[list[int], float]]:
    with torch.no_grad():
        result = model.generate(
            torch.tensor([prompt]),
            num_beams=params.width,
            num_return_sequences=params.n_best,
            max_new_tokens=params.max_tokens,
            length_penalty=params.length_penalty,
            early_stopping=params.early_stopping,
            eos_token_id=None if params.ignore_eos else EOS,
            pad_token_id=0,
            do_sample=False,
            output_scores=True,
            return_dict_in_generate=True,
        )
    texts = []
    for row, score in zip(result.sequences.tolist(), result.sequences_scores.tolist(), strict=True):
        tokens = row[len(prompt) :]
        ends = [] if params.ignore_eos else [i + 1 for i, t in enumerate(tokens) if t in EOS]
        texts.append((tokens[: min(ends, default=params.max_tokens)], score))
    return texts


@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize("length_penalty", [0.0, 1.0, -0.5, 2.0])
@pytest.mark.parametrize("early_stopping", [False, True, "never"])
def test_equals_transformers(
    peer: tuple[transformers.LlamaForCausalLM, str],
    width: int,
    length_penalty: float,
    early_stopping: bool,
) -> None:
    if width == 1:
        early_stopping, length_penalty = False, 1.0  # transformers then decodes greedily
    model, path = peer
    llm = LLM(path, dtype="float32", num_pages=120, page_size=4, max_num_batched_tokens=24)
    params = BeamSearchParams(
        width=width, max_tokens=12, length_penalty=length_penalty, n_best=max(1, width // 2),
        early_stopping=early_stopping, ignore_eos=length_penalty == 2.0,
    )  # fmt: skip
    torch.manual_seed(width)
    prompts = [torch.randint(8, 40, (n,)).tolist() for n in (1, 3, 8, 11)]
    outputs = llm.beam_search(prompts, params)
    for prompt, output in zip(prompts, outputs, strict=True):
        if width == 1:
            continue
        want = expected(model, prompt, params)
        assert [c.token_ids for c in output.outputs] == [tokens for tokens, _ in want]
        scores = [c.score for c in output.outputs]
        assert scores == pytest.approx([score for _, score in want], abs=1e-4)
        for completion in output.outputs:
            ends = completion.token_ids[-1] in EOS and not params.ignore_eos
            assert completion.finish_reason == ("stop" if ends else "length")
    if width == 1 and not params.ignore_eos:
        greedy = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=12))
        for output, plain in zip(outputs, greedy, strict=True):
            assert output.outputs[0].token_ids == plain.outputs[0].token_ids
    assert llm.stats().kv.in_use == 0


def test_a_search_among_other_requests(peer: tuple[transformers.LlamaForCausalLM, str]) -> None:
    """In a mixed batch, chunked, short of pages: the same hypotheses as alone."""
    model, path = peer
    llm = LLM(path, dtype="float32", num_pages=44, page_size=2, max_num_batched_tokens=9)
    prompt = [9, 10, 11, 12, 13, 14, 15]
    search = BeamSearchParams(width=4, max_tokens=10, n_best=4)
    sampling = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    prompts = [[20 + n, 21, 22] for n in range(5)]
    alone = [llm.generate([p], sampling)[0].outputs[0].token_ids for p in prompts]
    outputs = llm._finish_all(llm._add([*prompts, prompt], [*[sampling] * 5, search]))
    assert [o.outputs[0].token_ids for o in outputs[:5]] == alone
    want = expected(model, prompt, search)
    assert [c.token_ids for c in outputs[5].outputs] == [tokens for tokens, _ in want]
    assert llm.stats().num_preemptions > 0
    assert llm.stats().kv.in_use == 0


def test_beams_share_their_prompt(peer: tuple[transformers.LlamaForCausalLM, str]) -> None:
    """Pages in use stay far below a copy of everything for each beam."""
    _, path = peer
    llm = LLM(path, dtype="float32", num_pages=400, page_size=4)
    (output,) = llm._add([[9] * 60], [BeamSearchParams(width=8, max_tokens=20, ignore_eos=True)])
    most = 0
    while not output.finished:
        llm._step()
        most = max(most, llm.stats().kv.in_use)
    copied = 8 * (60 + 20) // 4
    assert most < 0.5 * copied
    assert llm.stats().kv.pages_copied > 0
    assert llm.stats().kv.in_use == 0


def test_refusals() -> None:
    for fields, message in [
        ({"width": 0}, "width is 0"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"n_best": 5}, "n_best is 5; .* from 1 to 4"),
        ({"length_penalty": float("nan")}, "length_penalty is nan"),
        ({"length_penalty": 1e308}, r"length_penalty is 1e\+308; .* at least -20 and at most 20"),
        ({"early_stopping": 1}, "early_stopping is 1; it must be True, False or 'never'"),
        ({"ignore_eos": "no"}, "ignore_eos is 'no'; it must be True or False"),
        ({"early_stopping": "soon"}, "early_stopping is 'soon'; it must be True, False or 'never'"),
    ]:
        with pytest.raises(ValueError, match=message):
            BeamSearchParams(**fields)  # type: ignore[arg-type]
