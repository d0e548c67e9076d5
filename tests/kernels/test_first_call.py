"""What a kernel's first call does beside Triton's compiler, and what it leaves as it was."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

triton = pytest.importorskip("triton", reason="Triton is not installed")

from rooftile.kernels.gluon.first_call import sooner  # noqa: E402
from rooftile.kernels.triton_version import TRITON_VERSION  # noqa: E402

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
        with sooner(kernel):
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
    with sooner(kernel):
        assert kernel.compile(SOURCE) == "compiled"
    before = threading.active_count()
    with pytest.raises(ValueError, match="not this kernel"), sooner(kernel):
        kernel.compile(None)
    assert threading.active_count() == before
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    with sooner(object()):  # as in the simulator
        assert not gc.isenabled()
    assert not gc.isenabled()
