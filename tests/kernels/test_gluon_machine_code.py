"""What ptxas makes of the Hopper kernels, compiled here for sm_90a without a GPU.

Needs Triton 3.6 (the version whose machine code is checked) and takes a few seconds a variant.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

triton = pytest.importorskip("triton", reason="Triton is not installed")
if not triton.__version__.startswith("3.6."):
    pytest.skip(
        f"machine code is checked on Triton 3.6, this is {triton.__version__}",
        allow_module_level=True,
    )

import triton.language as tl  # noqa: E402
from triton.experimental import gluon  # noqa: E402
from triton.experimental.gluon import language as gl  # noqa: E402

from rooftile.kernels.gluon.attention import tile_list  # noqa: E402
from rooftile.kernels.gluon.attention.config import (  # noqa: E402
    AGAIN_ROWS,
    ANCHORED,
    CAUSAL_64,
    DRAWN_64,
    DRAWN_128,
    PLAIN_128,
    SHORT_64,
    SHORT_128,
    Config,
    box_columns,
    config_of,
)
from rooftile.kernels.gluon.attention.config import CONFIGS as BY_DIM  # noqa: E402
from rooftile.kernels.gluon.attention.kernel import attention_kernel, constants  # noqa: E402
from tests.support.machine_code import (  # noqa: E402
    SHARED_MEMORY,
    MachineCode,
    compile_for_hopper,
    descriptor_type,
)

PLAIN = {"ragged": False, "dynamic": False, "has_left": False, "has_right": False,
         "has_softcap": False, "has_sink": False}  # fmt: skip
CAUSAL = {**PLAIN, "dynamic": True, "has_right": True}
EVEN = {**PLAIN, "has_right": True}
RAGGED = {**CAUSAL, "ragged": True}
ALIBI = {**CAUSAL, "has_alibi": True}
EVERYTHING = {**RAGGED, "has_left": True, "has_softcap": True, "has_sink": True}
CONFIGS = {"64": BY_DIM[64], "64 short": SHORT_64,
           "128": BY_DIM[128], "128 short": SHORT_128, "256": BY_DIM[256],
           "64 drawn": DRAWN_64, "64 causal": CAUSAL_64, "128 drawn": DRAWN_128,
           "128 plain": PLAIN_128, "64 anchored": ANCHORED[64], "128 anchored": ANCHORED[128],
           "256 alibi": config_of(256, 256, 2048, 0, has_alibi=True)}  # fmt: skip

BIASED = {"64", "64 short", "128", "128 short", "256 alibi"}


def compiled(
    config: Config | str,
    features: dict[str, bool],
    more_types: dict[str, Any] | None = None,
    dtype: Any = gl.bfloat16,
    **changes: Any,
) -> MachineCode:
    config = CONFIGS[config] if isinstance(config, str) else config
    leading = [1] * (3 if features["ragged"] else 2)
    types = dict.fromkeys(attention_kernel.arg_names, "i32")
    boxes = {
        "q": 64,
        "k": config.block,
        "v": config.block,
        "o": 64,
        "k_again": AGAIN_ROWS,
        "v_again": AGAIN_ROWS,
    }
    dims = {"q": "k_dim", "k": "k_dim", "v": "v_dim"}  # of the tiles that are loaded ahead
    for x, rows in boxes.items():
        columns = box_columns(config.dim, changes.get(dims.get(x, ""), config.dim))
        types[f"{x}_desc"] = descriptor_type([*leading, rows, columns], dtype)
    types |= {
        "lse": "*fp32",
        "sink": "*fp32",
        "slopes": "*fp32",
        "entries": "*i32",
        "cu_seqlens_q": "*i32",
        "cu_seqlens_k": "*i32",
        "parts": "*fp32",
        "arrived": "*i32",
        "factor": "fp32",
        "softcap": "fp32",
        "score_captured": (),
        "mask_captured": (),
    } | (more_types or {})
    values = dict(constants(config, **features, **changes))
    if not config.anchored:
        values |= {"k_again_desc": None, "v_again_desc": None}
    return compile_for_hopper(
        attention_kernel,
        types,
        values,
        most_registers=config.most_registers,
    )


def copies_of(config: Config, features: dict[str, bool]) -> int:
    """Of the consumers' code."""
    return 1 if config.has_one_copy(features.get("has_alibi", False)) else config.groups


@pytest.mark.parametrize(
    ("name", "features"),
    [
        ("64", PLAIN),
        ("64", CAUSAL),
        ("64 short", CAUSAL),
        ("128", PLAIN),
        ("128", CAUSAL),
        ("128", RAGGED),
        ("128 short", PLAIN),
        ("64 causal", EVEN),
        ("128 drawn", CAUSAL),
        ("128 plain", EVEN),
        ("256", CAUSAL),
        ("64 drawn", CAUSAL),
        ("128 anchored", PLAIN),
        ("128 anchored", RAGGED),
        *(pytest.param(name, EVERYTHING, marks=pytest.mark.slow) for name in CONFIGS),
        *(pytest.param(name, RAGGED, marks=pytest.mark.slow) for name in ("64", "64 short", "256")),
        pytest.param("256", PLAIN, marks=pytest.mark.slow),
        *(pytest.param(name, ALIBI, marks=pytest.mark.slow) for name in CONFIGS if name in BIASED),
    ],
    ids=lambda x: x if isinstance(x, str) else "+".join(k for k in x if x[k]) or "plain",
)
def test_attention(name: str, features: dict[str, bool]) -> None:
    code = compiled(name, features)
    config = CONFIGS[name]
    check_loops(code, config, copies_of(config, features))
    # An SM has 1 KB more than a lone CTA may take, and keeps 1 KB of each CTA's for itself.
    assert code.shared_bytes <= (SHARED_MEMORY + 1024) // config.ctas - 1024
    assert code.count("UTMALDG")
    assert code.count("UTMASTG")
    assert code.count("HGMMA")


def test_threads_that_release_for_themselves_do_not_meet() -> None:
    """For an arrival of one thread Triton has its warpgroup meet before and after."""

    def meetings(config: Config) -> list[int]:
        loops = compiled(config, PLAIN).product_loops()
        exponentials = config.block // 2
        return [x.count("BAR.SYNC") for x in loops if x.count("MUFU.EX2") >= exponentials]

    assert meetings(DRAWN_128) == [1]
    assert meetings(replace(DRAWN_128, by_threads=False)) == [4]


@pytest.mark.parametrize(
    ("config", "features"),
    [(SHORT_64, PLAIN), (DRAWN_64, CAUSAL), (SHORT_128, PLAIN), (DRAWN_128, CAUSAL)],
    ids=["64", "64 causal", "128", "128 causal"],
)
def test_the_first_tile_is_loaded_before_there_are_roles(
    config: Config, features: dict[str, bool]
) -> None:
    code = compiled(config, features)
    before_roles, _ = re.split(r"barrier\.sync\s+1;", code.ptx, maxsplit=1)
    copies = before_roles.count("cp.async.bulk.tensor.4d.shared")
    assert copies == config.groups + 2
    # A division by an unknown number is some forty instructions, one after the other.
    assert not re.search(r"\b(div|rem)\.[su]\d", before_roles)
    # Nor does it wait for the other barriers: those of the messages come last.
    first = before_roles.index("cp.async.bulk.tensor.4d.shared")
    assert before_roles[:first].count("mbarrier.init") == copies
    assert before_roles[first:].count("mbarrier.init") > 2 * copies


def test_ragged_and_cut_calls_have_no_first_tile_that_a_cta_knows() -> None:
    for ragged, split in ((True, False), (False, True)):
        values = dict(constants(SHORT_128, ragged, *[False] * 5, split=split))
        assert not values["loads_early"]
    assert dict(constants(SHORT_128, False, *[False] * 5))["loads_early"]


def check_loops(code: MachineCode, config: Config, copies: int, spills: int | None = None) -> None:
    # A second pass, and all options at once, take registers from what is alive across a tile, a few
    # accesses each; the loops over keys have none.
    if spills is None:
        spills = 100 if config.anchored else 12
    assert code.spills() <= spills
    loops = [loop for loop in code.product_loops() if not loop.count("UTMALDG")]
    assert len(loops) >= copies
    exponentials = config.block // 2  # a thread's share of a block's 64 rows
    for loop in loops:
        assert loop.hazards() == []
        if loop.count("MUFU.EX2") >= exponentials and not loop.count("UTMASTG"):
            assert loop.count("LDL") + loop.count("STL") == 0
        # Each product is in flight as a whole: ptxas waits after every instruction of it where
        # registers run short. That of 16 keys in a second pass is one or two instructions.
        assert loop.count("WARPGROUP.DEPBAR") < max(loop.count("HGMMA"), 2)
        if loop.count("HGMMA.64x") and config.overlapped:
            assert loop.overlapped_exponentials() >= exponentials or loop.count("MUFU.EX2") < 8


@pytest.mark.parametrize(
    ("name", "dims", "steps"),  # steps: of 16 columns, in the products of a block
    [
        ("128", (96, 96), 6 + 16),
        ("256", (192, 192), 12 + 8),
        ("256", (192, 128), 12 + 4),
        ("256 anchored", (192, 192), 12 + 8),
    ],
    ids=str,
)
def test_head_dims_between_powers_of_two(name: str, dims: tuple[int, int], steps: int) -> None:
    config = ANCHORED[256] if name == "256 anchored" else CONFIGS[name]
    code = compiled(config, PLAIN, k_dim=dims[0], v_dim=dims[1])
    check_loops(code, config, copies_of(config, PLAIN))
    exponentials = config.block // 2
    counts = [
        loop.count("HGMMA")
        for loop in code.product_loops()
        if exponentials <= loop.count("MUFU.EX2") < exponentials + 4
    ]
    assert counts[0] == steps


def test_what_consumers_call_is_translated_once() -> None:
    """Python's part of a first call: a third of it where each warpgroup has functions of its own."""
    functions = [name.rsplit(".", 1)[1] for name in compiled("128 anchored", CAUSAL).functions]
    for name in (
        "attend",
        "_attend",
        "attend_overlapped",
        "next_block",
        "attend_again",
        "_write_tile",
    ):
        assert functions.count(name) == 1, name


@pytest.mark.parametrize("name", ["64 drawn", "128"])
def test_few_sequences_are_sorted_by_each_cta(name: str) -> None:
    config = CONFIGS[name]
    code = compiled(name, RAGGED, most_sorted=config.most_sorted)
    check_loops(code, config, copies_of(config, RAGGED))
    assert code.shared_bytes <= (SHARED_MEMORY + 1024) // config.ctas - 1024


@pytest.mark.parametrize(
    ("name", "features"),
    [
        ("128 anchored", PLAIN),
        ("64 drawn", EVEN),
        ("128", {**EVEN, "ragged": True}),
        *(
            pytest.param(name, features, marks=pytest.mark.slow)
            for name in ("64", "128", "256", "128 short", "128 anchored", "64 anchored")
            for features in (PLAIN, EVEN)
        ),
    ],
    ids=lambda x: x if isinstance(x, str) else "+".join(k for k in x if x[k]) or "plain",
)
def test_tiles_in_parts(name: str, features: dict[str, bool]) -> None:
    """Parts are stored and read eight bytes at a time, outside the loops over keys."""
    config = CONFIGS[name]
    sorts: dict[str, Any] = {"most_sorted": config.most_sorted} if features["ragged"] else {}
    code = compiled(name, features, split=True, **sorts)
    check_loops(code, config, copies_of(config, features), spills=120)
    assert code.shared_bytes <= (SHARED_MEMORY + 1024) // config.ctas - 1024
    values = copies_of(config, features) * config.dim // 4  # a thread's pairs of the output
    assert code.count("STG.E.64") >= values
    assert code.count("LDG.E.64") >= values


@triton.jit
def _double(x):  # type: ignore[no-untyped-def]
    return 2.0 * x


@triton.jit
def _nearer(s, b, h, i, j, slopes):  # type: ignore[no-untyped-def]
    return tl.where(i > j, _double(s), s - tl.load(slopes + h) * tl.abs(i - j) + tl.exp(-s))


@triton.jit
def _document(b, h, i, j, documents):  # type: ignore[no-untyped-def]
    return tl.load(documents + i) == tl.load(documents + j)


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_functions_of_the_caller(dim: int) -> None:
    """Plain Triton functions, with what they call and load, compile within a Gluon kernel."""
    config = config_of(dim, dim, 2048, 0, has_mods=True)
    types = {"score_captured": ("*fp32",), "mask_captured": ("*i32",)}
    code = compiled(config, RAGGED, types, score_mod=_nearer, mask_mod=_document)
    loops = code.product_loops()
    assert len(loops) >= copies_of(config, RAGGED)
    for loop in loops:
        assert loop.hazards() == []
        assert loop.count("WARPGROUP.DEPBAR") < loop.count("HGMMA")


@triton.jit
def _by_kind(s, b, h, i, j, kinds):  # type: ignore[no-untyped-def]
    kind = tl.load(kinds + h)
    if kind == 0:
        s = 2.0 * s
    elif kind == 1:
        s = 3.0 - s
    elif kind == 2:
        s = s * s
    else:
        s = s + 1.0
    return s


@triton.jit
def _below_four(s, b, h, i, j, kinds):  # type: ignore[no-untyped-def]
    if tl.load(kinds + h) < 4:
        s = s * s + 1.0
    return s


@pytest.mark.parametrize(("mod", "kind"), [(_by_kind, "*i8"), (_below_four, "*u32")])
def test_choices_of_the_caller_are_not_taken_for_those_of_roles(mod: Any, kind: str) -> None:
    """LLVM IR in which another switch over bytes, and another comparison with 4, follow (one_copy.py)."""
    config = config_of(128, 128, 2048, 0, has_mods=True)
    code = compiled(config, CAUSAL, {"score_captured": (kind,)}, score_mod=mod)
    assert code.product_loops()


@triton.jit
def _less_the_highest(s, b, h, i, j):  # type: ignore[no-untyped-def]
    return s - tl.max(s, 0)[None, :]


def test_functions_of_the_caller_that_look_at_other_rows_are_refused() -> None:
    """Both warpgroups would write their maxima to the same place."""
    config = config_of(128, 128, 2048, 0, has_mods=True)
    with pytest.raises(ValueError, match="score_mod or mask_mod must be elementwise"):
        compiled(config, PLAIN, score_mod=_less_the_highest)


@gluon.jit
def _write(to, value):  # type: ignore[no-untyped-def]
    gl.store(to, value)


@gluon.jit
def _tells_a_sum(numbers, out, waits: gl.constexpr):  # type: ignore[no-untyped-def]
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    total = gl.sum(gl.load(numbers + gl.arange(0, 128, layout)), 0)
    if waits:
        gl.thread_barrier()
    gl.warp_specialize([(_write, (out, total)), (_write, (out + 1, 2 * total))], [1], [24])


def test_a_warp_that_tells_what_another_still_reads_is_found() -> None:
    """The attention kernel did so with the number of tiles of a ragged batch: on a GPU, wrong results and
    illegal accesses, once in a while."""
    types = {"numbers": "*i32", "out": "*i32"}
    with pytest.raises(AssertionError, match=r"st\.shared"):
        compile_for_hopper(_tells_a_sum, types, {"waits": False})
    compile_for_hopper(_tells_a_sum, types, {"waits": True})


def test_half_precision_compiles_too() -> None:
    code = compiled("128", PLAIN, dtype=gl.float16)
    assert code.spills() == 0
    assert any(".F16" in x.name or "F32" in x.name for x in code.instructions if "HGMMA" in x.name)


def test_the_list_of_ragged_tiles() -> None:
    types = dict.fromkeys(tile_list.list_tiles_kernel.arg_names, "i32")
    types |= {"entries": "*i32", "cu_seqlens_q": "*i32", "cu_seqlens_k": "*i32"}
    code = compile_for_hopper(tile_list.list_tiles_kernel, types, {"tile_rows": 128})
    assert code.spills() == 0
