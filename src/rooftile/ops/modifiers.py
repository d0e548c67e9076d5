"""`score_mod` and `mask_mod`: attention changed by functions of the caller (FlexAttention's idea).

Dong et al. 2024, "Flex Attention: A Programming Model for Generating Optimized Attention Kernels".
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from rooftile.kernels.modifiers import Kind, Modifier, functions, register

INDICES: dict[Kind, int] = {"score": 5, "mask": 4}  # arguments before the captured tensors


def score_mod(fn: Any, *, reference: Callable[..., Tensor]) -> Modifier:
    """Registers a function of scores, to be passed as `attention(..., score_mod=...)`.

    Both functions take (score, batch, head, q_index, kv_index, *tensors) and return the new score;
    they are elementwise and their arguments broadcast: a maximum over rows or an atomic of one number is
    refused on Hopper by a call that compiles it, with a ValueError. Scores are scaled, soft-capped, in natural
    units and float32. Indices count from 0 in each sequence, also in a ragged batch. Masks apply
    after it; a new score of -1e30 or less hides its key, as -inf does. `tensors` are those of `modifier(*tensors)`: pointers in Triton, tensors in torch.

    fn: a `@triton.jit` function, or None where only the reference is to run. It may be evaluated
        at any valid index, visible or not.
    reference: the same computation in torch; also the one that has gradients, for `tensors` too.
        It must capture no local variables, since its source names the modifier, with what its
        global names stand for now: captured tensors go through `modifier(*tensors)`.

    Raises:
        ValueError: something that is no such function.
    """
    return _registered("score_mod", "score", fn, reference)


def mask_mod(fn: Any, *, reference: Callable[..., Tensor]) -> Modifier:
    """Registers a function of visibility, to be passed as `attention(..., mask_mod=...)`.

    Both functions take (batch, head, q_index, kv_index, *tensors) and return whether the query sees
    the key; what a window, causality or the lengths hide stays hidden. Otherwise as `score_mod`.
    """
    return _registered("mask_mod", "mask", fn, reference)


def _registered(name: str, kind: Kind, fn: Any, reference: Callable[..., Tensor]) -> Modifier:
    if fn is not None and not (hasattr(fn, "fn") and hasattr(fn, "arg_names")):
        raise ValueError(
            f"{name}: fn is {fn!r}; decorate it with @triton.jit, or pass None to run only the "
            f"reference"
        )
    if not inspect.isfunction(reference):
        raise ValueError(f"{name}: reference is {reference!r}; it must be a torch function")
    if reference.__code__.co_kwonlyargcount:
        raise ValueError(
            f"{name}: {reference.__name__} has arguments that are given by name only, and nobody gives "
            f"them; make them tensors after the indices"
        )
    if reference.__closure__:
        raise ValueError(
            f"{name}: {reference.__name__} captures {', '.join(reference.__code__.co_freevars)}; "
            f"pass tensors as arguments, {name}(...)(tensor), so that its source says what it does"
        )
    given = INDICES[kind]
    for function, count in (
        ("fn", given if fn is None else len(fn.arg_names)),
        ("reference", reference.__code__.co_argcount),
    ):
        if count < given:
            raise ValueError(
                f"{name}: {function} takes {count} arguments; it is called with "
                f"{'(score, ' if kind == 'score' else '('}batch, head, q_index, kv_index, *tensors)"
            )
    if fn is not None and len(fn.arg_names) != reference.__code__.co_argcount:
        raise ValueError(
            f"{name}: fn takes {len(fn.arg_names)} arguments and reference "
            f"{reference.__code__.co_argcount}; both must take the same"
        )
    return register(kind, fn, reference)


def check_modifiers(
    operator: str, like: Tensor, score: Modifier | None, mask: Modifier | None
) -> None:
    """Each is None or a modifier of its kind, with tensors on the device of `like`."""
    for name, kind, modifier in (("score_mod", "score", score), ("mask_mod", "mask", mask)):
        if modifier is None:
            continue
        if not isinstance(modifier, Modifier) or modifier.kind != kind:
            raise ValueError(
                f"{operator}: {name} is {modifier!r}; pass what rooftile.{name}(fn, reference=...) "
                f"returned"
            )
        found = functions(modifier.key)
        assert found is not None
        expected = found.reference.__code__.co_argcount - INDICES[modifier.kind]
        if len(modifier.tensors) != expected:
            raise ValueError(
                f"{operator}: {name} {found.reference.__name__} takes {expected} tensors after its "
                f"indices but has {len(modifier.tensors)}; pass them as modifier(tensor, ...)"
            )
        for i, tensor in enumerate(modifier.tensors):
            if not isinstance(tensor, Tensor):
                raise ValueError(
                    f"{operator}: argument {i} of {name} is {tensor!r}; it must be a tensor"
                )
            if tensor.device != like.device:
                raise ValueError(
                    f"{operator}: tensor {i} of {name} is on {tensor.device} but q is on "
                    f"{like.device}; move one of them"
                )


def parts(modifier: Modifier | None) -> tuple[str, Sequence[Tensor]]:
    """Key and tensors as private operators take them."""
    return ("", []) if modifier is None else (modifier.key, list(modifier.tensors))
