"""Attention over paged keys and values (Kwon et al. 2023), and plans of it."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rooftile.kernels import Kernel
from rooftile.ops.attention_call import AttentionCall, fake_attention
from rooftile.ops.attention_check import Window, check_options
from rooftile.ops.check import check_flags, refuse_gradient, require
from rooftile.ops.eager import CheckedCalls, undispatched
from rooftile.ops.operator import Operator, contents_checked
from rooftile.ops.paged_check import (
    check_batch,
    check_keys,
    check_pages,
    check_prefix,
    check_scales,
)
from rooftile.ops.split_kv import SPLIT_KV
from rooftile.planning.split_kv import MOST_SHARING, Layout, defined
from rooftile.types import AttentionPlan, PagedBatch, SplitSpec

_CHECKED = CheckedCalls()


def paged_attention(
    q: Tensor,  # [tokens, num_q_heads, k_dim]
    k_pages: Tensor,  # [num_pages, num_kv_heads, page_size, k_dim]
    v_pages: Tensor,  # [num_pages, num_kv_heads, page_size, v_dim]
    batch: PagedBatch,
    *,
    causal: bool = True,
    window: Window | None = None,
    softcap: float = 0.0,
    sink: Tensor | None = None,  # [num_q_heads]
    softmax_scale: float | None = None,
    k_scale: Tensor | None = None,  # [num_kv_heads] float32
    v_scale: Tensor | None = None,  # [num_kv_heads] float32
    plan: AttentionPlan | None = None,
    batch_invariant: bool = False,
    return_lse: bool = False,
    kernel: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """`attention` of each request's queries over the keys and values in its pages.

    Serves prefill, decode and any mixture: request i has queries cu_seqlens_q[i] to
    cu_seqlens_q[i + 1] (none is allowed) and keys 0 to kv_lens[i], of which key j lies in page
    page_table[i, j // page_size] at offset j % page_size. Its last query stands at its last key.
    Nothing else is read: entries of the table past a request's last page and those of pages
    wholly outside its window may be anything, slots without a key may hold NaN, and tokens
    after the last request are padding with output 0 and lse -inf. Causal by default. The other
    options and the results are those of `attention`. Not differentiable.

    Pages may be torch.float8_e4m3fn: a head's keys then are k_pages * k_scale[head], its values
    v_pages * v_scale[head]. `plan` is what `plan_paged_attention` made of this batch with the
    same options: calls of many layers may share it. With `batch_invariant` a request's bits do
    not depend on the rest of the batch (a plan brings its own choice). Where `batch.prefix` says
    which requests share pages, these are attended once for all of them if that saves enough; not
    with a left window or `batch_invariant`, and under torch.compile only by a plan.

    Args:
        q: [tokens, num_q_heads, k_dim]
        k_pages: [num_pages, num_kv_heads, page_size, k_dim]
        v_pages: [num_pages, num_kv_heads, page_size, v_dim]
        sink: [num_q_heads]
        k_scale: [num_kv_heads] float32
        v_scale: [num_kv_heads] float32

    Returns:
        out [tokens, num_q_heads, v_dim]; with `return_lse` also lse [tokens, num_q_heads].

    Raises:
        ValueError: as `attention`; and, where the contents are checked (on a CPU, or with
            ROOFTILE_CHECK=1), lengths beyond the maxima, the tokens or the table's reach, pages
            outside the pool, and a plan of other lengths.
        NotImplementedError: inputs that require a gradient.
    """
    name = "paged_attention"
    optional = (sink, k_scale, v_scale)
    options = (causal, window, softcap, softmax_scale, batch_invariant, return_lse, kernel)
    kind = _kind(q, k_pages, v_pages, batch, optional, plan, options)
    if kind is not None:
        run = _CHECKED.get(kind)
        if run is not None:
            out, lse = run(*_tensors(q, k_pages, v_pages, batch, optional, plan))
            return (out, lse) if return_lse else out
    check_pages(name, q, "q", k_pages, v_pages)
    check_keys(name, q, k_pages)
    scales = {"k_scale": k_scale, "v_scale": v_scale}
    pools = {"k_pages": k_pages, "v_pages": v_pages}
    refuse_gradient(name, "use attention_varlen, or ", q=q, **pools, sink=sink, **scales)
    check_flags(name, batch_invariant=batch_invariant)
    left, right, scale = check_options(name, q, causal, window, softcap, sink, softmax_scale)
    check_batch(name, q, k_pages, batch, left)
    if batch.prefix is not None:
        check_prefix(name, batch, batch.prefix, k_pages.shape[2])
    check_scales(name, k_pages, v_pages, k_scale, v_scale)
    call = paged_call(q, k_pages, v_pages, sink, left, right, softcap, batch_invariant)
    if plan is None and _groups(call, batch) and not torch.compiler.is_compiling():
        plan = make_plan(call, batch, q.shape[0], kernel)
    elif plan is not None:
        _check_plan(name, plan, call, batch, q.shape[0], kernel)
    out, lse = run_planned(
        *(q, k_pages, v_pages, batch, plan, sink, left, right, softcap, scale),
        *(k_scale, v_scale, batch_invariant, kernel, bool(return_lse)),
    )
    if kind is not None:
        rest = (batch.max_q_len, batch.max_kv_len, left, right, softcap, scale, batch_invariant)
        run = PAGED_ATTENTION.bind(
            _tensors(q, k_pages, v_pages, batch, optional, plan),
            (*rest, plan_arguments(plan)[1], bool(return_lse)),
            kernel if plan is None else plan.kernel,
            _join,
        )
        _CHECKED.add(kind, run)
    return (out, lse) if return_lse else out


_Optional = tuple[Tensor | None, Tensor | None, Tensor | None]  # sink, k_scale, v_scale


def _kind(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    batch: PagedBatch,
    optional: _Optional,
    plan: AttentionPlan | None,
    options: tuple[Any, ...],
) -> Hashable | None:
    """All that checks and the choice of a kernel look at; None where they have to look each time."""
    if type(batch) is not PagedBatch or batch.prefix is not None:
        return None
    tensors = [q, k_pages, v_pages, batch.cu_seqlens_q, batch.kv_lens, batch.page_table]
    tensors += [x for x in optional if x is not None]
    planned = None
    if plan is not None:
        if type(plan) is not AttentionPlan:
            return None
        tensors.append(plan.buffer)
        planned = (plan.kernel, plan.split)
    if not undispatched(*tensors) or contents_checked(q):
        return None
    return (
        *[(x.shape, x.stride(), x.dtype, x.device) for x in tensors],
        *[x is None for x in optional],
        *(batch.max_q_len, batch.max_kv_len, planned, options),
    )


def _tensors(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    batch: PagedBatch,
    optional: _Optional,
    plan: AttentionPlan | None,
) -> tuple[Tensor | None, ...]:
    lengths = (batch.cu_seqlens_q, batch.kv_lens, batch.page_table)
    follows = plan is not None and plan.split is not None
    return (q, k_pages, v_pages, *lengths, *optional, plan.buffer if follows else None)  # type: ignore[union-attr]


def _join(tensors: tuple[Any, ...], rest: tuple[Any, ...]) -> tuple[Any, ...]:
    """The operator's private arguments in order."""
    sink, k_scale, v_scale, plan = tensors[6:]
    return (*tensors[:6], *rest[:2], sink, *rest[2:6], k_scale, v_scale, rest[6], plan, *rest[7:])


def run_planned(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    batch: PagedBatch,
    plan: AttentionPlan | None,
    sink: Tensor | None,
    left: int,
    right: int,
    softcap: float,
    scale: float,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    batch_invariant: bool = False,
    kernel: str = "auto",
    with_lse: bool = True,
) -> tuple[Tensor, Tensor]:
    """`paged_attention` without checks: out and lse, which a kernel may leave unwritten without `with_lse`."""

    results: tuple[Tensor, Tensor] = PAGED_ATTENTION.handle(
        *(q, k_pages, v_pages, batch.cu_seqlens_q, batch.kv_lens, batch.page_table),
        *(batch.max_q_len, batch.max_kv_len, sink, left, right, softcap, scale),
        *(k_scale, v_scale, batch_invariant, *plan_arguments(plan), with_lse),
        kernel if plan is None else plan.kernel,
    )
    return results


def plan_paged_attention(
    q: Tensor,  # [tokens, num_q_heads, k_dim]
    k_pages: Tensor,  # [num_pages, num_kv_heads, page_size, k_dim]
    v_pages: Tensor,  # [num_pages, num_kv_heads, page_size, v_dim]
    batch: PagedBatch,
    *,
    causal: bool = True,
    window: Window | None = None,
    softcap: float = 0.0,
    sink: Tensor | None = None,  # [num_q_heads]
    batch_invariant: bool = False,
    kernel: str = "auto",
) -> AttentionPlan:
    """How `paged_attention` of this batch is split over the GPU, for all layers of equal shapes.

    Of q and the pages only shapes, dtypes and the device matter, and of the sink whether there is
    one; lengths are read on the device, without waiting for it, so a captured CUDA graph plans
    anew in each replay. The plan is valid as long as the lengths are.

    batch_invariant: cut every request at fixed keys, so that its bits do not depend on the others.

    Args:
        q: [tokens, num_q_heads, k_dim]
        k_pages: [num_pages, num_kv_heads, page_size, k_dim]
        v_pages: [num_pages, num_kv_heads, page_size, v_dim]
        sink: [num_q_heads]

    Raises:
        ValueError: as `paged_attention`.
        NotImplementedError: an explicitly chosen kernel that cannot run the call; under
            torch.compile, where a plan is an argument.
    """
    name = "plan_paged_attention"
    if torch.compiler.is_compiling():
        raise NotImplementedError(
            f"{name}: plans are made outside of torch.compile; make it before, and pass it to the "
            f"compiled function for paged_attention(plan=...)"
        )
    check_pages(name, q, "q", k_pages, v_pages)
    check_keys(name, q, k_pages)
    left, right, _ = check_options(name, q, causal, window, softcap, sink, None)
    check_flags(name, batch_invariant=batch_invariant)
    check_batch(name, q, k_pages, batch, left)
    if batch.prefix is not None:
        check_prefix(name, batch, batch.prefix, k_pages.shape[2])
    call = paged_call(q, k_pages, v_pages, sink, left, right, softcap, batch_invariant)
    return make_plan(call, batch, q.shape[0], kernel)


def make_plan(call: AttentionCall, batch: PagedBatch, tokens: int, kernel: str) -> AttentionPlan:
    """`plan_paged_attention` without checks."""
    family = PAGED_ATTENTION.choose(call, kernel)
    split = _split(family, call, batch, tokens)
    if split is None:
        return no_plan(family, batch)
    return AttentionPlan(family, split, _planned(batch, split))


def _planned(batch: PagedBatch, split: SplitSpec) -> Tensor:
    prefix = batch.prefix if split.groups else None
    shared = (None, None) if prefix is None else (prefix.first, prefix.lens)
    buffer: Tensor = SPLIT_KV.handle(
        batch.cu_seqlens_q, batch.kv_lens, split.numbers, *shared, "auto"
    )
    return buffer


def no_plan(family: str, batch: PagedBatch) -> AttentionPlan:
    """The choice of a kernel that follows none."""
    return AttentionPlan(family, None, batch.kv_lens.new_empty(0, dtype=torch.int32))


def follows_plan(call: AttentionCall) -> bool:
    """Whether the kernel that `auto` chooses does, which then can read a shared prefix once."""
    kernel = PAGED_ATTENTION.kernel(PAGED_ATTENTION.choose(call))
    return isinstance(kernel, Kernel) and kernel.split is not None


def plan_arguments(plan: AttentionPlan | None) -> tuple[Tensor | None, list[int]]:
    """A plan as the operator takes it; without one a kernel that follows plans makes its own."""
    if plan is None or plan.split is None:
        return None, []
    return plan.buffer, plan.split.numbers


def _groups(call: AttentionCall, batch: PagedBatch) -> int:
    """How many groups of requests a plan may find to share a prefix."""
    if batch.prefix is None or call.left >= 0 or call.batch_invariant:
        return 0
    groups = batch.prefix.lens.shape[0]
    return groups if batch.kv_lens.shape[0] + groups <= MOST_SHARING else 0


def _split(family: str, call: AttentionCall, batch: PagedBatch, tokens: int) -> SplitSpec | None:
    kernel = PAGED_ATTENTION.kernel(family)
    assert isinstance(kernel, Kernel)
    if kernel.split is None:
        return None
    capacities = (batch.kv_lens.shape[0], tokens, batch.max_q_len, batch.max_kv_len)
    split: SplitSpec = kernel.split(call, *capacities, _groups(call, batch))
    if split.groups and batch.max_q_len * split.group_size > split.tile_rows[-1]:
        split = kernel.split(call, *capacities)  # many queries: products bind, not what is read
    return split


def _check_plan(
    name: str,
    plan: AttentionPlan,
    call: AttentionCall,
    batch: PagedBatch,
    tokens: int,
    kernel: str,
) -> None:
    require(
        isinstance(plan, AttentionPlan),
        lambda: f"{name}: plan is {plan!r:.80}; pass what plan_paged_attention returned",
    )
    require(
        kernel in ("auto", plan.kernel),
        lambda: (
            f"{name}: kernel={kernel!r} but the plan is for {plan.kernel!r}; "
            f"give plan_paged_attention the same kernel"
        ),
    )
    if torch.compiler.is_compiling():
        return
    if plan.split is not None and plan.split.piece:
        call = replace(call, batch_invariant=True)
    PAGED_ATTENTION.choose(call, plan.kernel)  # raises where the kernel cannot run the call
    wanted = _split(plan.kernel, call, batch, tokens)
    require(
        wanted == plan.split,
        lambda: (
            f"{name}: the plan was made for {plan.split}, and this call needs {wanted}; "
            f"call plan_paged_attention with the arguments of this call"
        ),
    )
    if wanted is None or not contents_checked(batch.kv_lens):
        return
    fits = plan.buffer.shape == (Layout(wanted).size,)
    now = _planned(batch, wanted)
    require(
        fits and defined(plan.buffer.tolist(), wanted) == defined(now.tolist(), wanted),
        lambda: (
            f"{name}: the plan was made for other lengths than those of this batch; call "
            f"plan_paged_attention again wherever they change"
        ),
    )


def paged_call(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    sink: Tensor | None,
    left: int,
    right: int,
    softcap: float,
    batch_invariant: bool = False,
) -> AttentionCall:
    return AttentionCall(
        q.device.type,
        q.dtype,
        q.shape[1],
        k_pages.shape[1],
        k_pages.shape[3],
        v_pages.shape[3],
        left,
        right,
        has_softcap=softcap != 0,
        has_sink=sink is not None,
        page_size=k_pages.shape[2],
        kv_dtype=None if k_pages.dtype == q.dtype else k_pages.dtype,
        batch_invariant=batch_invariant,
    )


PAGED_ATTENTION = Operator(
    "paged_attention",
    "(Tensor q, Tensor k_pages, Tensor v_pages, Tensor cu_seqlens_q, Tensor kv_lens,"
    " Tensor page_table, SymInt max_q_len, SymInt max_kv_len, Tensor? sink,"
    " int left, int right, float softcap, float scale, Tensor? k_scale, Tensor? v_scale,"
    " bool batch_invariant, Tensor? plan, SymInt[] split, bool with_lse) -> (Tensor, Tensor)",
    module="paged",
    families=("gluon", "triton", "cpu", "torch", "reference"),
    call=lambda q, k_pages, v_pages, *rest: paged_call(
        *(q, k_pages, v_pages, *rest[5:9], rest[12])
    ),
    fake=lambda q, k_pages, v_pages, *_: fake_attention(q, v_pages),
)
