"""SamplingParams and EngineConfig refuse what cannot be meant, with the value and the range."""

from __future__ import annotations

import math
import pickle

import pytest

from rooftile.engine.config import EngineConfig
from rooftile.engine.params import SamplingParams


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n": 0}, "n is 0; it must be a whole number at least 1"),
        ({"n": 1.0}, "n is 1.0"),
        ({"n": True}, "n is True"),
        ({"temperature": -0.1}, "temperature is -0.1; it must be a finite number at least 0"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"temperature": math.inf}, "temperature is inf"),
        ({"temperature": "hot"}, "temperature is 'hot'"),
        ({"top_p": 0.0}, "top_p is 0.0; it must be a finite number above 0 and at most 1"),
        ({"top_p": 1.01}, "top_p is 1.01"),
        ({"top_p": math.nan}, "top_p is nan"),
        ({"top_k": -1}, r"top_k is -1; .* \(0 keeps every token\)"),
        ({"min_p": 1.5}, "min_p is 1.5"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0"),
        ({"presence_penalty": 3.0}, "presence_penalty is 3.0; .* at least -2 and at most 2"),
        ({"frequency_penalty": math.nan}, "frequency_penalty is nan"),
        ({"logit_bias": {"a": 1.0}}, "logit_bias key is 'a'"),
        ({"logit_bias": {1: math.inf}}, r"logit_bias\[1\] is inf"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias key is -1"),
        ({"logit_bias": [1]}, r"logit_bias is \[1\]; it must map"),
        ({"seed": 2**63}, "seed is 9223372036854775808"),
        ({"seed": 1.5}, "seed is 1.5"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"min_tokens": -1}, "min_tokens is -1"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens is 5; .* from 0 to 4"),
        ({"stop": ""}, "stop has ''"),
        ({"stop": ["a", ""]}, "stop has ''"),
        ({"stop": [3]}, "stop has 3"),
        ({"stop_token_ids": [-1]}, "stop_token_ids entry is -1"),
        ({"stop_token_ids": 5}, "stop_token_ids is 5; it must be a list"),
        ({"stop": 5}, "stop is 5; it must be"),
        ({"logprobs": -1}, "logprobs is -1"),
        ({"ignore_eos": 1}, "ignore_eos is 1; it must be True or False"),
        ({"temperature": 10**400}, "temperature is 1000.* at least 0 that float32 can hold"),
        ({"temperature": 1e39}, r"temperature is 1e\+39; .* that float32 can hold"),
        ({"top_p": 1e-50}, "top_p is 1e-50; .* that float32 can hold"),
        ({"repetition_penalty": 1e-50}, "repetition_penalty is 1e-50"),
        ({"repetition_penalty": 1e39}, r"repetition_penalty is 1e\+39"),
        ({"top_k": 2**63}, r"top_k is 9223372036854775808; .* \(0 keeps every token\)"),
        ({"stop_token_ids": b"x"}, "stop_token_ids is b'x'; it must be a list"),
        ({"stop_token_ids": {1: 2}}, "stop_token_ids is {1: 2}; it must be a list"),
        ({"stop": {"a": 1}}, "stop is {'a': 1}; it must be a list"),
        ({"logit_bias": []}, r"logit_bias is \[\]; it must map"),
    ],
)
def test_refusals(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams(**fields)  # type: ignore[arg-type]


def test_stop_is_a_tuple_whatever_was_given() -> None:
    assert SamplingParams().stop_strings == ()
    assert SamplingParams(stop="end").stop_strings == ("end",)
    assert SamplingParams(stop=["a", "b"]).stop_strings == ("a", "b")


def test_it_travels_between_processes() -> None:
    params = SamplingParams(n=2, stop=["x"], logit_bias={3: 1.5}, seed=1)
    assert pickle.loads(pickle.dumps(params)) == params


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"page_size": 3}, "page_size is 3; choose a power of two from 1 to 256"),
        ({"page_size": 512}, "page_size is 512"),
        ({"page_size": 16.0}, "page_size is 16.0"),
        ({"page_size": True}, "page_size is True"),
        ({"kv_memory_share": "0.3"}, "kv_memory_share is '0.3'"),
        ({"pipeline_depth": 2.0}, "pipeline_depth is 2.0"),
        ({"seed": None}, "seed is None; it must be a whole number"),
        ({"prefix_cache": "no"}, "prefix_cache is 'no'; it must be True or False"),
        ({"random_weights": 1}, "random_weights is 1"),
        ({"dtype": "int8"}, "dtype is 'int8'; choose one of auto"),
        ({"device": "tpu"}, "device is 'tpu'; the engine runs on"),
        ({"max_num_seqs": 0}, "max_num_seqs is 0"),
        ({"num_pages": -1}, "num_pages is -1"),
        ({"kv_memory_share": 1.5}, "kv_memory_share is 1.5"),
        ({"pipeline_depth": 3}, "pipeline_depth is 3"),
        ({"gpu_memory": 1}, "unknown engine option 'gpu_memory'; the options are dtype, device"),
    ],
)
def test_engine_options(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineConfig.build("model", **options)
