"""What a kernel's first call does beside Triton's compiler, and what it leaves as it was."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

triton = pytest.importorskip("triton", reason="Triton is not installed")

import torch  # noqa: E402
import triton.language as tl  # noqa: E402
from triton._C.libtriton import llvm  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.backends.nvidia import compiler  # noqa: E402
from triton.compiler import ASTSource, code_generator  # noqa: E402

from rooftile.kernels import triton_version  # noqa: E402
from rooftile.kernels.gluon.attention.config import (  # noqa: E402
    ANCHORED,
    CONFIGS,
    DRAWN_64,
    DRAWN_128,
    Config,
)
from rooftile.kernels.gluon.attention.kernel import attention_kernel, constants  # noqa: E402
from rooftile.kernels.gluon.first_call import (  # noqa: E402
    optimised,
    sooner,
    spares_llvm,
    unchecked,
)
from rooftile.kernels.gluon.paged import config as paged  # noqa: E402
from rooftile.kernels.gluon.paged.kernel import constants as paged_constants  # noqa: E402
from rooftile.kernels.gluon.paged.kernel import paged_kernel  # noqa: E402
from rooftile.kernels.offline import offline  # noqa: E402
from rooftile.kernels.triton_version import (  # noqa: E402
    TRITON_VERSION,
    little_llvm,
    translate_sooner,
)

SOURCE = SimpleNamespace(signature={"x_desc": "tensordesc<bf16[64, 64],l>", "n": "i32"})


class Kernel:
    """As a jitted function: what it compiles with is known once somebody asks for a device's cache."""

    def __init__(self, compile_: Any) -> None:
        self.compiles_with = compile_
        self.device_caches = self

    def __getitem__(self, device: str) -> None:
        self.compile = self.compiles_with


@pytest.fixture
def launchers(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, Any, threading.Thread]]:
    """Source, metadata and thread of each launcher that is built."""
    built: list[tuple[Any, Any, threading.Thread]] = []
    driver = SimpleNamespace(
        get_current_device=lambda: "gpu",
        launcher_cls=lambda src, data: built.append((src, data, threading.current_thread())),
    )
    monkeypatch.setattr(triton.runtime.driver, "_active", driver)
    return built


@pytest.fixture(autouse=True)
def _collecting() -> Iterator[None]:
    gc.enable()
    yield
    gc.enable()


@pytest.mark.skipif(TRITON_VERSION != (3, 6), reason="another Triton is left to itself")
def test_a_launcher_is_built_while_a_kernel_is_compiled(
    launchers: list[tuple[Any, Any, threading.Thread]],
) -> None:
    began = threading.Event()

    def compile_(src: Any, **options: Any) -> tuple[Any, ...]:
        began.set()
        return src, options, gc.isenabled()

    kernel = Kernel(compile_)
    for _ in range(2):  # once for each compilation, however often the kernel is looked at
        with sooner(kernel, {}):
            result = kernel.compile(SOURCE, target="sm_90")
    assert result == (SOURCE, {"target": "sm_90"}, False)
    assert gc.isenabled()
    assert len(launchers) == 2
    for src, data, thread in launchers:
        assert src is SOURCE
        assert len(data.tensordesc_meta) == 1
        assert thread is not threading.current_thread()
        assert not thread.is_alive()


@pytest.mark.skipif(TRITON_VERSION != (3, 6), reason="another Triton is left to itself")
def test_errors_are_the_compilers(
    launchers: list[tuple[Any, Any, threading.Thread]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launcher that cannot be built is Triton's to report; a kernel's error leaves nothing running."""

    def no_compiler(*_: Any) -> None:
        raise RuntimeError("no C compiler")

    def compile_(src: Any) -> str:
        if src is None:
            raise ValueError("not this kernel")
        return "compiled"

    monkeypatch.setattr(triton.runtime.driver.active, "launcher_cls", no_compiler)
    kernel = Kernel(compile_)
    with sooner(kernel, {}):
        assert kernel.compile(SOURCE) == "compiled"
    before = threading.active_count()
    with pytest.raises(ValueError, match="not this kernel"), sooner(kernel, {}):
        kernel.compile(None)
    assert threading.active_count() == before
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    with sooner(object(), {}):  # as in the simulator
        assert not gc.isenabled()
    assert not gc.isenabled()


def level() -> Any:
    """What Triton's compiler takes for LLVM's highest level."""
    return compiler.llvm.OPTIMIZE_O3


@pytest.mark.skipif(TRITON_VERSION != (3, 6), reason="another Triton is left to itself")
def test_llvm_is_spared_by_this_thread_alone_and_not_for_longer() -> None:
    with ThreadPoolExecutor(1) as pool:
        with suppress(ValueError), little_llvm():
            assert level() == llvm.OPTIMIZE_O0
            assert pool.submit(level).result() == llvm.OPTIMIZE_O3
            with little_llvm():
                pass
            assert level() == llvm.OPTIMIZE_O0
            raise ValueError
        assert level() == pool.submit(level).result() == llvm.OPTIMIZE_O3
    assert compiler.llvm.translate_to_asm is llvm.translate_to_asm


@triton.jit
def _copy(x, out):  # type: ignore[no-untyped-def]
    tl.store(out, tl.load(x))


@pytest.mark.skipif(TRITON_VERSION != (3, 6), reason="another Triton is left to itself")
def test_what_llvm_was_spared_for_is_another_entry_of_the_cache(tmp_path: Path) -> None:
    """Or a kernel would stay what it was before a mark came or went, in tests of machine code as well."""
    source = ASTSource(fn=_copy, signature={"x": "*fp32", "out": "*fp32"})
    found = []
    with triton.knobs.cache.scope(), triton.knobs.compilation.scope():
        triton.knobs.cache.dir = str(tmp_path)
        triton.knobs.compilation.listener = lambda *, cache_hit, **_: found.append(cache_hit)
        for _ in range(2):
            for level in (nullcontext, little_llvm):
                with level():
                    triton.compile(source, target=GPUTarget("cuda", 90, 32))
    assert found == [False, False, True, True]


@triton.jit
def _sum(x, y, out):  # type: ignore[no-untyped-def]
    tl.store(out, tl.load(x) + tl.load(y) * 3)


def test_sums_that_are_not_checked_are_the_same(tmp_path: Path) -> None:
    source = ASTSource(fn=_sum, signature=dict.fromkeys(("x", "y", "out"), "*i32"))
    with triton.knobs.cache.scope(), triton.knobs.runtime.scope():
        triton.knobs.cache.dir = str(tmp_path)
        checked, plain = (
            triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
            for options in ({}, unchecked())
        )
        triton.knobs.runtime.debug = True
        assert unchecked() == {"sanitize_overflow": True}
    assert len(plain.asm["source"]) < len(checked.asm["source"])
    assert plain.asm["ttgir"] == checked.asm["ttgir"]
    assert plain.asm["cubin"] == checked.asm["cubin"]


@pytest.mark.skipif(TRITON_VERSION != (3, 6), reason="another Triton is left to itself")
def test_what_translates_sooner_says_and_warns_what_triton_does() -> None:
    """Names of types are in the messages of errors, and what Triton warns of is heard."""
    translate_sooner()
    assert tl.tuple_type([tl.int32, tl.float32]).name == "[:int32,:fp32]"
    assert str(tl.tuple_type([tl.int32], ["rows"])) == "[rows:int32]"
    named = tl.tuple_type([tl.int32], ["rows"])
    assert named != tl.tuple_type([tl.int32])
    assert named == tl.tuple_type([tl.int32], ["rows"])
    with pytest.warns(UserWarning, match="hidden"):
        code_generator.warnings.warn("hidden", stacklevel=1)
    with code_generator.warnings.catch_warnings():
        code_generator.warnings.simplefilter("ignore", UserWarning)


@pytest.mark.skipif(TRITON_VERSION != (3, 6), reason="another Triton is left to itself")
def test_threads_that_begin_at_once_change_triton_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice told apart, a kernel would have another key than the same of another process."""
    told = []

    def slowly(backend_hash: Any) -> Any:
        told.append(backend_hash)
        time.sleep(0.05)
        return backend_hash

    def spare() -> None:
        with little_llvm():
            pass

    monkeypatch.setattr(compiler, "llvm", llvm)
    monkeypatch.setattr(compiler.CUDABackend, "hash", compiler.CUDABackend.hash)
    monkeypatch.setattr(triton_version, "_told_apart", slowly)
    with ThreadPoolExecutor(4) as pool:
        for one in [pool.submit(spare) for _ in range(4)]:
            one.result()
    assert len(told) == 1


@pytest.mark.skipif(TRITON_VERSION != (3, 6), reason="another Triton is left to itself")
def test_classes_of_a_marked_kernel_spare_llvm_where_they_say_so() -> None:
    marked, other = object(), object()
    assert spares_llvm(where=lambda constants: constants["plain"])(marked) is marked
    spared = [(marked, True), (marked, False), (other, True)]
    levels = []
    for kernel, plain in spared:
        with optimised(kernel, {"plain": plain}):
            levels.append(level())
    assert levels == [llvm.OPTIMIZE_O0, llvm.OPTIMIZE_O3, llvm.OPTIMIZE_O3]


@pytest.mark.skipif(TRITON_VERSION != (3, 6), reason="another Triton is left to itself")
@pytest.mark.parametrize(
    ("config", "features", "expected"),
    [
        (ANCHORED[128], {}, "O0"),
        (ANCHORED[128], {"has_right": True}, "O0"),
        (ANCHORED[128], {"ragged": True}, "O3"),
        (ANCHORED[128], {"ragged": True, "has_right": True}, "O0"),
        (ANCHORED[128], {"ragged": True, "split": True}, "O0"),
        (ANCHORED[256], {}, "O3"),
        (ANCHORED[256], {"has_right": True}, "O0"),
        (CONFIGS[256], {}, "O3"),
        (CONFIGS[256], {"split": True}, "O0"),
        (CONFIGS[128], {"has_right": True}, "O0"),
        (DRAWN_64, {"has_right": True}, "O3"),
        (DRAWN_128, {"has_right": True}, "O3"),
        (CONFIGS[128], {"has_alibi": True}, "O3"),
        (CONFIGS[128], {"score_mod": len}, "O3"),
        (CONFIGS[128], {"mask_mod": len}, "O3"),
    ],
)
def test_what_attention_is_optimised_by(
    config: Config, features: dict[str, Any], expected: str
) -> None:
    needed = ("ragged", "dynamic", "has_left", "has_right", "has_softcap", "has_sink")
    of_class = dict(constants(config, **(dict.fromkeys(needed, False) | features)))
    with optimised(attention_kernel, of_class):
        assert level() == getattr(llvm, f"OPTIMIZE_{expected}")


@pytest.mark.skipif(TRITON_VERSION != (3, 6), reason="another Triton is left to itself")
@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (paged.LARGE[64], "O0"),
        (paged.LARGE[128], "O0"),
        (paged.SHORT[paged.LARGE[128]], "O3"),
        (paged.SMALL[128][0], "O3"),
    ],
)
def test_what_paged_attention_is_optimised_by(config: paged.Config, expected: str) -> None:
    plain = (16, 4, 4, False, False, True, False, False)
    with optimised(paged_kernel, dict(paged_constants(config, *plain))):
        assert level() == getattr(llvm, f"OPTIMIZE_{expected}")


@pytest.mark.skipif(TRITON_VERSION != (3, 6), reason="another Triton is left to itself")
def test_a_first_call_compiles_as_its_class_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through everything between a call and LLVM: what is checked of machine code is what runs."""
    from rooftile.kernels.gluon import attention as kernels

    levels = []
    optimise = llvm.optimize_module

    def optimize_module(module: Any, level: Any, *rest: Any, **options: Any) -> None:
        levels.append(level)
        optimise(module, level, *rest, **options)

    monkeypatch.setattr(llvm, "optimize_module", optimize_module)
    with offline("sm_90a", tmp_path) as built:
        for q_len in (200, 300):  # CAUSAL_64, DRAWN_64
            x = torch.empty(200, q_len, 1, 64, dtype=torch.bfloat16)
            kernels.attention(x, x, x, None, -1, 0, 0.0, 0.125)
    assert not any(one.found for one in built)
    assert levels == [llvm.OPTIMIZE_O0, llvm.OPTIMIZE_O3]
