"""Clusters, of which kernels know by assembly: their barriers, multicast, and sums that CTAs exchange.

Addresses are numbers: of barriers from BARRIERS on, of shared tiles from TILES on, in the order in
which Triton lays them out (larger allocations first), plus a multiple of OF_RANK in another CTA.
"""

from __future__ import annotations

import re
from copy import copy
from typing import Any

import torch
from torch import Tensor

from tests.support.gluon_sim import machine
from tests.support.gluon_sim.barrier import MBarrier
from tests.support.gluon_sim.errors import SimulationError
from tests.support.gluon_sim.memory import Descriptor, SharedTile, Tile, tile

BARRIERS, TILES, OF_RANK = 1 << 12, 1 << 16, 1 << 24
_FIELDS_OF_DESCRIPTOR = 5  # of a descriptor of two dimensions: its map, two sizes, two strides
_PACK = 4
_BLOCK, _COLUMNS = 64, 8  # of a product, and of a piece of it


def run(asm: str, args: list[Any]) -> Any:
    """What an instruction sequence returns, `None` where it has nothing to do with clusters."""
    if "cluster_barriers" in asm:
        return _start(asm)
    if asm == "mov.b32 $0, global_smem;":
        return TILES
    if asm.startswith("barrier.cluster.arrive"):
        return _join()
    if "cp.async.bulk.tensor" in asm:
        return _load_steps(asm, *args)
    if "mbarrier.test_wait" in asm:
        return 0  # not yet, as far as anybody may know
    if "mbarrier.try_wait" in asm:
        barrier = _barrier(machine.role().cta, args[0])
        machine.mbarrier_wait(barrier, args[1])
        return args[1]
    if "mbarrier.arrive.expect_tx" in asm:
        _barrier(machine.role().cta, args[0]).arrive(1, int(_number(r"\[\$1\], (\d+)", asm)))
        return args[0]
    if "mbarrier.arrive.shared::cluster" in asm:
        count = _number(r"setp\.lt\.u32 mine, thread, (\d+)", asm)
        step = _number(r"mad\.lo\.u32 there, thread, (\d+)", asm)
        for i in range(count):
            _barrier(_peer(args[1] + i * step), args[0]).arrive()
            machine.scheduler().pause()
        return args[0]
    if "wgmma.mma_async" in asm:
        return _multiply(asm, *args)
    if asm.startswith("wgmma.wait_group"):
        return machine.warpgroup_mma_wait(_number(r"aligned (\d+);", asm), args)
    if "st.shared.v4.f32 [at]" in asm:
        return _give(*args)
    if asm.endswith("ld.shared.v4.f32 {$0, $1, $2, $3}, [at]; }"):
        return machine.role().cta.inbox[_address(args[0])].clone()
    if asm.startswith("mapa."):
        return int(args[0]) + (int(args[1]) + 1) * OF_RANK
    if asm.startswith("st.async."):
        return _send(*args)
    if asm.startswith("ld.shared.v4"):
        return _read(args[0])
    return None


def _number(pattern: str, asm: str) -> int:
    found = re.search(pattern, asm)
    if found is None:
        raise SimulationError(f"no {pattern!r} in {asm!r}")
    return int(found[1])


def _size() -> int:
    """CTAs of a cluster."""
    options = machine.role().cta.launch.options
    return int(options.get("sharers", 1) * options.get("across", 1) * options.get("split", 1))


def _peer(rank: int) -> Any:
    cta = machine.role().cta
    first = cta.program_id[0] // _size() * _size()
    if not 0 <= rank < _size():
        raise SimulationError(f"CTA {rank} of a cluster of {_size()}")
    return cta.launch.ctas[first + rank]


def _start(asm: str) -> int:
    cta = machine.role().cta
    found = re.findall(r"mbarrier\.init\.shared::cta\.b64 \[\$0\+(\d+)\], (\d+)", asm)
    for first, count in re.findall(r"\[at(?:\+(\d+))?\], (\d+)", asm):
        stages = _number(r"setp\.lt\.u32 mine, stage, (\d+)", asm)
        found += [(int(first or 0) + 8 * i, count) for i in range(stages)]
    for at, count in found:
        barrier = MBarrier(f"barrier {at}")
        barrier.init(int(count))
        cta.cluster_barriers[int(at)] = barrier
    return BARRIERS


def _join() -> int:
    me = machine.role()
    first = me.cta.program_id[0] // _size() * _size()
    ctas, size = me.cta.launch.ctas, _size()

    def here() -> bool:
        return all(bool(i in ctas and ctas[i].cluster_barriers) for i in range(first, first + size))

    machine.scheduler().pause(here, "the CTAs of the cluster")
    return 0


def _barrier(cta: Any, address: int) -> MBarrier:
    at = int(address) % OF_RANK - BARRIERS
    if at not in cta.cluster_barriers:
        raise SimulationError(f"no barrier at {at}")
    found: MBarrier = cta.cluster_barriers[at]
    return found


def _operand(cta: Any, address: int) -> SharedTile:
    """The stage of an operand that begins at this address, and what follows to its end."""
    operands = cta.shared[:2]
    sizes = [x.data.numel() * x.data.element_size() for x in operands]
    places = (0, sizes[0]) if sizes[0] >= sizes[1] else (sizes[1], 0)
    for x, size, place in zip(operands, sizes, places, strict=True):
        at = int(address) - TILES - place
        if 0 <= at < size:
            stages, rows, columns = x.data.shape
            row = at // (columns * x.data.element_size())
            return x.reshape([stages * rows, columns]).slice(row, stages * rows - row, 0)
    raise SimulationError(f"no operand at {address}")


def _load_steps(
    asm: str,
    barriers: int,
    a: int,
    b: int,
    k0: int,
    row: int,
    column: int,
    all_of_them: int,
    beside: int,
    stage: int,
    phase: int,
    steps: int,
) -> int:
    a_bytes, b_bytes = (_number(rf"mad\.lo\.u32 {x}, stage, (\d+)", asm) for x in "ab")
    depth, stages = _number(r"add\.u32 k, k, (\d+)", asm), _number(r"last, stage, (\d+)", asm)
    empty = _number(r"\[full\+(\d+)\], phase", asm)
    for step in range(steps):
        turns, at = divmod(stage + step, stages)
        full = barriers + 8 * at
        machine.mbarrier_wait(_barrier(machine.role().cta, full + empty), phase ^ 1 ^ turns & 1)
        places = a + at * a_bytes, b + at * b_bytes
        _load(asm, full, *places, k0 + step * depth, row, column, all_of_them, beside)
    return k0


def _load(
    asm: str,
    full: int,
    a: int,
    b: int,
    k0: int,
    row: int,
    column: int,
    all_of_them: int,
    beside: int,
) -> None:
    """A step."""
    me = machine.role().cta
    first, second = re.findall(r"_param_(\d+);", asm)
    size = _number(r"expect_tx\.shared::cta\.b64 _, \[full\], (\d+)", asm)
    _barrier(me, full).arrive(1, size)
    of_a, of_b = (_argument(me, int(number)) for number in (first, second))
    ranks = range(_size())
    targets, others = [me], [me]
    if "[full], all" in asm:
        targets = [_peer(rank) for rank in ranks if all_of_them >> rank & 1]
    if "[full], beside" in asm:
        others = [_peer(rank) for rank in ranks if beside >> rank & 1]
    for target in others:
        _copy(of_a, (row, k0), target, full, a)
    # Its map may be of more columns than Triton is told: see launch.py, Box.
    row_bytes = of_b.block_shape[1] * of_b.dtype.itemsize
    of_b = copy(of_b)
    rows = (size - len(others) * of_a.block_type.nbytes) // len(targets) // row_bytes
    of_b.block_shape = [rows, of_b.block_shape[1]]
    for target in targets:
        _copy(of_b, (column, k0), target, full, b)
    machine.scheduler().pause()


class Piece(machine.Product):
    """Some rows and columns of a product in flight."""

    def __init__(self, whole: machine.Product, row: int, column: int) -> None:
        self.whole, self.row, self.column = whole, row, column

    @property
    def retired(self) -> bool:  # type: ignore[override]
        return self.whole.retired

    def evaluate(self) -> Tensor:
        rows = self.whole.evaluate()[self.row : self.row + _BLOCK]
        return tile(rows[:, self.column : self.column + _COLUMNS])


def _multiply(asm: str, left: Tensor, right: Tensor, *pieces: Any) -> tuple[Piece, ...]:
    """A step of operands at two addresses; pieces: of the accumulator, side by side, 64 rows at a time."""
    cta, n = machine.role().cta, _number(r"m64n(\d+)k16", asm)
    a, b = (_operand(cta, int(x.reshape(-1)[0])) for x in (left, right))
    in_row = n // _COLUMNS
    blocks = [pieces[i : i + in_row] for i in range(0, len(pieces), in_row)]
    acc: Any = pieces[0]
    acc = acc.whole if isinstance(acc, Piece) else torch.cat([torch.cat(x, 1) for x in blocks])
    product = machine.warpgroup_mma(
        a.slice(0, _BLOCK * len(blocks), 0),
        b.slice(0, n, 0).permute((1, 0)),
        acc,
        use_acc="setp.ne.b32 add, 1, 0; wgmma.fence" in asm,
        is_async=True,
    )
    places = [divmod(i, in_row) for i in range(len(pieces))]
    return tuple(Piece(product, row * _BLOCK, column * _COLUMNS) for row, column in places)


def _argument(cta: Any, number: int) -> Descriptor:
    found = cta.launch.arguments[number // _FIELDS_OF_DESCRIPTOR]
    assert isinstance(found, Descriptor)
    return found


def _copy(desc: Descriptor, corner: tuple[int, int], cta: Any, full: int, address: int) -> None:
    target = _operand(cta, address).slice(0, desc.block_shape[0], 0)
    barrier = _barrier(cta, full)
    target.poison()
    place, inside = desc.addresses(corner)

    def complete() -> None:
        values = desc.memory[torch.where(inside, place, 0)]
        target.data.copy_(torch.where(inside, values, 0))
        barrier.deliver(desc.block_type.nbytes)

    machine.scheduler().events.append(complete)


def _address(places: Tensor) -> int:
    return int(places.reshape(-1)[0])


def _give(x: Tensor, places: Tensor) -> Tile:
    """A piece of sums, to whoever looks at the same address."""
    machine.role().cta.inbox[_address(places)] = x.clone()
    machine.scheduler().pause()
    return tile(torch.zeros(x.shape, dtype=torch.int32))


def _packs(places: Tensor) -> tuple[Tensor, Tensor]:
    """Order of the elements in which those of one thread follow each other, and where each four lie."""
    flat = places.as_subclass(Tensor).reshape(-1)
    order = torch.argsort(flat, stable=True)
    return order, flat[order].view(-1, _PACK)[:, 0]


def _send(x: Tensor, places: Tensor, barriers: Tensor) -> Tile:
    rank = int(places.reshape(-1)[0]) // OF_RANK - 1
    target = _peer(rank)
    order, at = _packs(places)
    values = x.as_subclass(Tensor).reshape(-1)[order].view(-1, _PACK)
    barrier = _barrier(target, int(barriers.reshape(-1)[0]))

    def complete() -> None:
        for address, four in zip((at % OF_RANK).tolist(), values, strict=True):
            target.inbox[address] = four
        barrier.deliver(values.numel() * 4)

    machine.scheduler().events.append(complete)
    machine.scheduler().pause()
    return tile(torch.zeros(x.shape, dtype=torch.int32))


def _read(places: Tensor) -> Tile:
    inbox = machine.role().cta.inbox
    order, at = _packs(places)
    out = torch.empty(places.numel(), dtype=torch.float32)
    out[order] = torch.stack([inbox[address] for address in at.tolist()]).reshape(-1)
    return tile(out.view(places.shape))
