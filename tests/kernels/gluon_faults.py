"""Small kernels, right and wrong, on which the simulator is tested (test_gluon_sim.py)."""

# mypy: disable-error-code="no-untyped-def"

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from rooftile.kernels.gluon.tile.barrier import pass_turn, start_turns, take_turn
from rooftile.kernels.gluon.tile.mma import accumulator_layout, multiply, wait
from rooftile.kernels.gluon.tile.ring import first_fill, new_ring
from rooftile.kernels.triton_version import tma_load, tma_store, tma_store_wait


@gluon.jit
def _produce(ring, desc, n):
    at = first_fill()
    for i in range(n):
        ring.acquire(at)
        ring.load(at, desc, (i * 64, 0))
        at = ring.after(at)


@gluon.jit
def _add_up(ring, out_desc, out_tile, n, fault: gl.constexpr):
    layout: gl.constexpr = accumulator_layout(64)
    total = gl.zeros([64, 64], gl.float32, layout)
    at = first_fill()
    for _ in range(n):
        if fault != "no arrival":
            ring.arrived(at)
        tile = ring.tile(at)
        if fault == "early release":
            ring.release(at)
        total = multiply(tile, tile, total)
        if fault == "no wait":
            total = total + 1.0
        total = wait(0, deps=[total])
        if fault != "early release" and fault != "no release":
            ring.release(at)
        at = ring.after(at)
    out_tile.store(total.to(gl.float16))
    if fault != "no fence":
        fence_async_shared()
    tma_store(out_desc, (gl.program_id(0) * 64, 0), out_tile)
    if fault == "overwritten":
        out_tile.store((total * 0.0).to(gl.float16))
        fence_async_shared()
    if fault != "no store wait":
        tma_store_wait(0)


@gluon.jit
def sum_of_products(desc, out_desc, n, fault: gl.constexpr):
    """out = the sum over i of tile(i) @ tile(i), for n tiles of 64 x 64."""
    ring = new_ring(desc, 64, 64, 2, 1)
    out_tile = gl.allocate_shared_memory(gl.float16, [64, 64], out_desc.layout)
    fence_async_shared()
    gl.warp_specialize(
        [(_add_up, (ring, out_desc, out_tile, n, fault)), (_produce, (ring, desc, n))], [1], [24]
    )


@gluon.jit
def _turns(group: gl.constexpr, log, n, fault: gl.constexpr):
    start_turns(group, 2)
    for i in range(n):
        take_turn(group, 2)
        gl.store(log + (2 * i + group), gl.atomic_add(log + 2 * n, 1))
        if fault != "no pass" or group == 0:
            pass_turn(group, 2)


@gluon.jit
def take_turns(log, n, fault: gl.constexpr):
    """Two warpgroups log the order in which they come."""
    gl.warp_specialize(
        [(_turns, (gl.constexpr(0), log, n, fault)), (_turns, (gl.constexpr(1), log, n, fault))],
        [4],
        [24],
    )


@gluon.jit
def wait_for_nothing(desc):
    """A barrier that nobody completes."""
    bar = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    mbarrier.init(bar.index(0), count=2)
    tile = gl.allocate_shared_memory(gl.float16, [64, 64], desc.layout)
    mbarrier.expect(bar.index(0), desc.block_type.nbytes)
    tma_load(desc, (0, 0), bar.index(0), tile)
    mbarrier.wait(bar.index(0), 0)


@gluon.jit
def double(source, out, scratch, n, fault: gl.constexpr):
    """out = 2 * source, of n numbers up to 64, by way of scratch memory of the kernel's."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    lanes = gl.arange(0, 64, layout)
    there = lanes < n
    shift = 0
    if fault == "before":
        shift = -1
    if fault == "a load":
        x = gl.load(source + lanes)  # which lanes beyond n are not used does not matter
    else:
        x = gl.load(source + shift + lanes, mask=there, other=0.0)
    if fault == "a copy":
        tile = gl.allocate_shared_memory(
            gl.float32, [64], gl.SwizzledSharedLayout(1, 1, 1, order=[0])
        )
        async_copy.async_copy_global_to_shared(tile, source + lanes)
    if fault == "an atomic":
        gl.atomic_add(out + n, 0.0)
    if fault != "never written":
        gl.store(scratch + lanes, x, mask=there)
    x = 2.0 * gl.load(scratch + lanes, mask=there, other=0.0)
    if fault == "a store":
        gl.store(out + lanes, x)
    else:
        gl.store(out + lanes, x, mask=there)
