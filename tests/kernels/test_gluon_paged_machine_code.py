"""What ptxas makes of the paged Hopper kernels, compiled here for sm_90a without a GPU."""

from __future__ import annotations

from typing import Any

import pytest

triton = pytest.importorskip("triton", reason="Triton is not installed")
if not triton.__version__.startswith("3.6."):
    pytest.skip(
        f"machine code is checked on Triton 3.6, this is {triton.__version__}",
        allow_module_level=True,
    )

from triton.experimental.gluon import language as gl  # noqa: E402

from rooftile.kernels.gluon.paged.config import (  # noqa: E402
    LARGE,
    LONG,
    QUANTISED,
    SHORT,
    SMALL,
    SMALL_PAGE_Q_LEN,
    Config,
    of_pages,
)
from rooftile.kernels.gluon.paged.kernel import constants, paged_kernel  # noqa: E402
from rooftile.kernels.gluon.tile.policy import say_policies, with_policies  # noqa: E402
from tests.support.machine_code import (  # noqa: E402
    MachineCode,
    compile_for_hopper,
    descriptor_type,
)

SHARED_MEMORY_OF_AN_SM = 228 * 1024
RESERVED = 1024  # of a CTA
# Accesses of a prefill to local memory, once an item, most where weights overflow.
OUTSIDE_LOOPS = 200
PLAIN, EVERYTHING = (False, True, False, False), (True, True, True, True)
POINTERS = {
    **dict.fromkeys(("lse", "partial_out", "partial_lse", "sink", "k_scale", "v_scale"), "*fp32"),
    **dict.fromkeys(("q", "out"), "*bf16"),
    **dict.fromkeys(("plan", "page_table", "cu_seqlens_q"), "*i32"),
    **dict.fromkeys(("factor", "softcap"), "fp32"),
}


def compiled(
    config: Config, page_size: int, features: tuple[bool, ...], quantised: bool = False,
    passing: bool = False,
) -> MachineCode:  # fmt: skip
    group_size = 0 if config.few and quantised else 4
    rows = config.few or 64
    types = dict.fromkeys(paged_kernel.arg_names, "i32") | POINTERS
    packed = [1, 1, rows // max(group_size, 1), max(group_size, 1), 64]
    page = [1, 1, 1, min(config.block, page_size), 128 if quantised else 64]
    types["q_desc"] = types["o_desc"] = descriptor_type(packed)
    dtype: Any = gl.float8e4nv if quantised else gl.bfloat16
    types["k_pages"] = types["v_pages"] = "*fp8e4nv" if quantised else "*bf16"
    types["k_desc"] = types["v_desc"] = descriptor_type(page, dtype)
    values = dict(
        constants(config, page_size, group_size, 4, quantised, *features, passing=passing)
    )
    return compile_for_hopper(paged_kernel, types, values, most_registers=config.most_registers)


def check(code: MachineCode, config: Config, most_spills: int = 0) -> None:
    assert code.spills() <= most_spills
    assert (code.shared_bytes + RESERVED) * config.ctas <= SHARED_MEMORY_OF_AN_SM
    assert code.count("UTMALDG")
    assert code.count("HGMMA")
    for loop in code.product_loops():
        assert loop.hazards() == []


@pytest.mark.parametrize("quantised", [False, True], ids=["16 bits", "8 bits"])
def test_eight_rows(quantised: bool) -> None:
    config = (QUANTISED if quantised else SMALL)[128][0]
    code = compiled(config, 16, PLAIN, quantised)
    check(code, config)
    loop = max(code.product_loops(), key=lambda loop: loop.count("HGMMA"))
    products = 2 * (config.block // 64) * 128 // 16
    assert loop.count("HGMMA.64x8x16") == products
    # What goes through shared memory in a tile are weights and maxima; 8-bit keys are not written.
    assert loop.count("STS") <= 4 * config.block // 64 + 2


@pytest.mark.parametrize("page_size", [16, 64])
def test_prefill(page_size: int) -> None:
    config = of_pages(LARGE[128], page_size, SMALL_PAGE_Q_LEN)
    code = compiled(config, page_size, PLAIN)
    check(code, config, OUTSIDE_LOOPS)
    assert code.count("UTMASTG")
    assert max(loop.overlapped_exponentials() for loop in code.product_loops()) >= 64


@pytest.mark.parametrize("page_size", [16, 64])
def test_prefill_of_few_keys(page_size: int) -> None:
    config = SHORT[LARGE[128]]
    code = compiled(config, page_size, PLAIN)
    check(code, config, OUTSIDE_LOOPS)
    assert max(loop.overlapped_exponentials() for loop in code.product_loops()) >= 32


def test_prefill_at_head_dim_64() -> None:
    """Four warpgroups on an SM overlap each other: two CTAs must fit, and loops spill next to nothing."""
    code = compiled(LARGE[64], 64, PLAIN)
    check(code, LARGE[64], OUTSIDE_LOOPS)
    loops = [loop for loop in code.product_loops() if loop.count("HGMMA") == 8]
    for loop in sorted(loops, key=lambda loop: len(loop.body))[:2]:  # not those of a second pass
        assert loop.count("LDL") + loop.count("STL") <= 2


@pytest.mark.slow
@pytest.mark.parametrize("features", [PLAIN, EVERYTHING], ids=["plain", "everything"])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_every_configuration(dim: int, features: tuple[bool, ...]) -> None:
    # A prefill with every feature spills what its producer has to know of windows, and two CTAs more.
    spills = (128 if dim == 64 else 64) if features == EVERYTHING else 0
    for config in (*SMALL[dim], *(config for config in LONG.values() if config.dim == dim)):
        check(compiled(config, 16, features), config, spills)
    if dim < 256:  # at 256 a prefill spills some more
        for page_size in (16, 64):
            config = of_pages(LARGE[dim], page_size, SMALL_PAGE_Q_LEN)
            check(compiled(config, page_size, features), config, OUTSIDE_LOOPS + spills)
            if LARGE[dim] in SHORT:
                config = SHORT[LARGE[dim]]
                check(compiled(config, page_size, features), config, OUTSIDE_LOOPS + spills)
    for config in QUANTISED.get(dim, ())[:2]:
        check(compiled(config, 16, features, quantised=True), config, spills)


@pytest.mark.parametrize("passing", [False, True])
def test_only_beside_shared_prefixes_copies_have_a_policy(passing: bool) -> None:
    assert say_policies()
    code = compiled(SMALL[128][2], 16, PLAIN, passing=passing)
    check(code, SMALL[128][2])
    loads = [x.text for x in code.instructions if x.name.startswith("UTMALDG")]
    assert loads
    assert {"desc[" in text for text in loads} == {passing}
    # Set by who loads keys, and by who loads values.
    assert code.ptx.count("selp.b64 copy_policy") == 2 * passing


def test_a_policy_is_for_kernels_that_set_one(monkeypatch: pytest.MonkeyPatch) -> None:
    load = "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
    kernel = f"entry(\n)\n{{\n{load} [%r1], [%rd2, {{%r3, %r4}}], [%r5];\n}}\n"
    assert with_policies(kernel) == kernel
    changed = with_policies(kernel.replace("}\n", "mov.b64 copy_policy, 1;\n}\n"))
    assert f"{load}.L2::cache_hint [%r1], [%rd2, {{%r3, %r4}}], [%r5], copy_policy;" in changed
    assert changed.index(".reg .b64 copy_policy;") < changed.index(load)
    # What somebody else has compiled kernels looked at by stays.
    monkeypatch.setattr(triton.knobs.runtime, "add_stages_inspection_hook", print)
    assert not say_policies()
    assert triton.knobs.runtime.add_stages_inspection_hook is print


def test_parts_are_written_before_they_are_counted() -> None:
    names = [x.name for x in compiled(SMALL[128][0], 16, PLAIN).instructions]
    count = next(i for i, name in enumerate(names) if name.startswith("ATOMG"))
    assert names[count - 4 : count] == ["MEMBAR.ALL.CTA", "MEMBAR.ALL.GPU", "ERRBAR", "CGAERRBAR"]
    written = max(i for i in range(count) if names[i].startswith("STG"))
    assert any(name.startswith("BAR.SYNC") for name in names[written:count])
    assert names[count + 1].startswith("CCTL.IVALL")  # what comes after reads no stale line
