"""The simulated machine: launches, CTAs and their roles, asynchronous copies and products."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from tests.support.gluon_sim.barrier import MBarrier, MBarrierLayout, MBarriers, NamedBarrier
from tests.support.gluon_sim.errors import SimulationError
from tests.support.gluon_sim.memory import (
    Descriptor,
    Pointer,
    SharedTile,
    Tile,
    nothing,
    pointer,
    tile,
)
from tests.support.gluon_sim.regions import watching_what_is_written
from tests.support.gluon_sim.scheduler import Scheduler, Task, current_task

_settings: dict[str, int] = {"seed": 0, "residency": 2}


@contextlib.contextmanager
def simulation(seed: int = 0, residency: int = 2) -> Iterator[None]:
    """Settings of the launches inside: the scheduler's seed, CTAs resident at a time."""
    before = dict(_settings)
    _settings.update(seed=seed, residency=residency)
    try:
        with watching_what_is_written():
            yield
    finally:
        _settings.update(before)


class Cta:
    def __init__(self, launch: Launch, program_id: tuple[int, int, int]) -> None:
        self.launch = launch
        self.program_id = program_id
        self.shared: list[SharedTile] = []
        self.named_barriers = [NamedBarrier() for _ in range(16)]
        self.cluster_barriers: dict[int, MBarrier] = {}  # by their place, see cluster.py
        self.inbox: dict[int, Tensor] = {}  # sums from other CTAs, by their address
        self.num_roles = 1
        self.roles_left = 1


class Role:
    """What a task runs on: one warp-specialised partition of a CTA."""

    def __init__(self, cta: Cta, number: int, warps: int) -> None:
        self.cta = cta
        self.number = number
        self.threads = 32 * warps
        self.products: list[Product] = []
        self.stores: list[Store] = []
        self.last_poll: tuple[int, int, Any] | None = None


class Launch:
    def __init__(self, grid: Sequence[int]) -> None:
        self.scheduler = Scheduler(_settings["seed"])
        self.grid = (*grid, 1, 1)[:3]
        self.ctas: dict[int, Cta] = {}  # by number, those that have started
        self.arguments: tuple[Any, ...] = ()
        self.options: dict[str, Any] = {}


def launch(kernel: Callable[..., None], grid: Any, *args: Any, **options: Any) -> None:
    """Runs a grid of CTAs to its end. Tensors become pointers, as Triton's launcher makes them."""
    warps = options.pop("num_warps", 4)
    names = inspect.signature(kernel).parameters
    bound = inspect.signature(kernel).bind(
        *args, **{k: v for k, v in options.items() if k in names}
    )
    bound.arguments = {
        name: pointer(value, name) if isinstance(value, Tensor) else value
        for name, value in bound.arguments.items()
    }
    machine = Launch(grid)
    machine.arguments, machine.options = args, options
    scheduler = machine.scheduler
    x, y, z = machine.grid
    waiting = [(i, j, k) for k in range(z) for j in range(y) for i in range(x)]
    waiting.reverse()

    def start() -> None:
        cta = Cta(machine, waiting.pop())
        machine.ctas[cta.program_id[0]] = cta
        context = Role(cta, 0, warps)

        def body() -> None:
            kernel(*bound.args, **bound.kwargs)
            _finish_role(context)

        scheduler.add(Task(f"CTA {cta.program_id} main", body, context))

    def task_done(task: Task) -> None:
        cta = task.context.cta
        cta.roles_left -= 1
        if cta.roles_left == 0 and waiting:
            start()

    scheduler.on_task_done = task_done
    for _ in range(min(_settings["residency"], len(waiting))):
        start()
    scheduler.run()


def role() -> Role:
    context: Role = current_task().context
    return context


def scheduler() -> Scheduler:
    return role().cta.launch.scheduler


def _finish_role(context: Role) -> None:
    if context.stores:
        raise SimulationError("a role ends while a TMA store may still read its shared memory")
    if context.products:
        raise SimulationError("a role ends with a product in flight")


def specialize_evenly(
    functions: Sequence[tuple[Callable[..., None], Sequence[Any]]], worker_warps: Sequence[int]
) -> None:
    warp_specialize(functions, worker_warps, [0] * len(worker_warps))


def warp_specialize(
    functions: Sequence[tuple[Callable[..., None], Sequence[Any]]],
    worker_warps: Sequence[int],
    worker_registers: Sequence[int],
) -> None:
    if len(functions) != len(worker_warps) + 1 or len(worker_warps) != len(worker_registers):
        raise SimulationError("one warp count and register budget for each worker")
    main = role()
    cta = main.cta
    left = len(worker_warps)

    def make(number: int, warps: int) -> Task:
        function, arguments = functions[number]
        context = Role(cta, number, warps)

        def body() -> None:
            nonlocal left
            function(*arguments)
            _finish_role(context)
            left -= 1

        return Task(f"CTA {cta.program_id} role {number} {function.__name__}", body, context)

    cta.num_roles = len(functions)
    cta.roles_left += left
    for number, warps in enumerate(worker_warps, start=1):
        scheduler().add(make(number, warps))
    function, arguments = functions[0]
    function(*arguments)
    scheduler().pause(lambda: left == 0, "the other roles to end")


def allocate_shared_memory(dtype: torch.dtype, shape: Sequence[int], layout: Any) -> Any:
    cta = role().cta
    if isinstance(layout, MBarrierLayout):
        return MBarriers(f"barrier {len(cta.shared)}", shape[0])
    shape = [int(n) for n in shape]
    memory = SharedTile(
        torch.full(shape, nothing(dtype), dtype=dtype), torch.full(shape, -1, dtype=torch.int8)
    )
    cta.shared.append(memory)
    return memory


def shared_store(target: SharedTile, value: Tensor) -> None:
    if value.dtype != target.dtype or list(value.shape) != target.shape:
        raise SimulationError(
            f"store of {value.dtype} {list(value.shape)} to {target.dtype} {target.shape}"
        )
    target.data.copy_(value)
    target.unfenced.fill_(role().number)
    scheduler().pause()


def shared_load(source: SharedTile, layout: Any = None) -> Tile:
    scheduler().pause()
    return tile(source.data.clone())


SharedTile.store = shared_store  # type: ignore[attr-defined]
SharedTile.load = shared_load  # type: ignore[attr-defined]


def fence_async_shared(cluster: bool = False) -> None:
    me = role()
    for memory in me.cta.shared:
        memory.unfenced[memory.unfenced == me.number] = -1


# --- barriers ---------------------------------------------------------------------------------


def mbarrier_wait(barrier: MBarrier, phase: int, pred: bool = True, deps: Any = ()) -> None:
    if pred:
        scheduler().pause(lambda: barrier.passed(phase), f"{barrier.name} phase parity {phase}")


def mbarrier_expect(barrier: MBarrier, num_bytes: int, pred: bool = True) -> None:
    if pred:
        barrier.arrive(1, num_bytes)


def mbarrier_arrive(barrier: MBarrier, *, count: int = 1, pred: bool = True) -> None:
    if pred:
        barrier.arrive(count)
        scheduler().pause()


def mbarrier_arrive_by_threads(barrier: MBarrier, increment_count: bool = True) -> None:
    """cp.async.mbarrier.arrive of every thread, none of which has started a copy."""
    if increment_count or hasattr(role(), "copy_groups"):
        raise SimulationError(
            "only for arrivals that the barrier counts, by threads without copies"
        )
    barrier.arrive(role().threads)
    scheduler().pause()


def named_barrier(kind: str, number: int, expected: int) -> None:
    me = role()
    barrier = me.cta.named_barriers[number]
    generation = barrier.come(me.threads, expected)
    if kind == "sync":
        scheduler().pause(lambda: barrier.generation > generation, f"named barrier {number}")
    else:
        scheduler().pause()


# --- the copy engine --------------------------------------------------------------------------


def _check_box(desc: Descriptor, shared: SharedTile) -> None:
    if shared.shape != desc.block_shape or shared.dtype != desc.dtype:
        raise SimulationError(f"box {desc.block_shape} copied to or from a tile {shared.shape}")


def tma_load(
    desc: Descriptor,
    coordinates: Sequence[int],
    barrier: MBarrier,
    result: SharedTile,
    pred: bool = True,
) -> None:
    if not pred:
        return
    _check_box(desc, result)
    result.poison()
    address, inside = desc.addresses(coordinates)

    def complete() -> None:
        values = desc.memory[torch.where(inside, address, 0)]
        result.data.copy_(torch.where(inside, values, 0))
        barrier.deliver(desc.block_type.nbytes)

    scheduler().events.append(complete)
    scheduler().pause()


class Store:
    read = False


def tma_store(desc: Descriptor, coordinates: Sequence[int], source: SharedTile) -> None:
    _check_box(desc, source)
    source.read_by_hardware("TMA store")
    address, inside = desc.addresses(coordinates, reads=False)
    store = Store()

    def complete() -> None:
        values = source.read_by_hardware("TMA store")
        desc.memory[address[inside]] = values[inside]
        desc.region.wrote(address[inside])
        store.read = True

    role().stores.append(store)
    scheduler().events.append(complete)
    scheduler().pause()


def tma_store_wait(pendings: int, read_only: bool = True) -> None:
    stores = role().stores
    covered = stores[: max(len(stores) - pendings, 0)]
    scheduler().pause(lambda: all(s.read for s in covered), "TMA stores to read their source")
    del stores[: len(covered)]


# --- products ---------------------------------------------------------------------------------


class Product:
    """A warpgroup product in flight; using it as a tile before its wait is an error."""

    def __init__(self, compute: Callable[[], Tensor]) -> None:
        self._compute: Callable[[], Tensor] | None = compute
        self._value: Tensor | None = None
        self.retired = False

    def evaluate(self) -> Tensor:
        if self._value is None:
            assert self._compute is not None
            self._value, self._compute = self._compute(), None
        return self._value

    def __getattr__(self, name: str) -> Any:
        raise SimulationError(f"{name!r} of a product that no warpgroup_mma_wait covers")

    def _used(self, *_: Any) -> Any:
        raise SimulationError("arithmetic on a product that no warpgroup_mma_wait covers")

    __add__ = __radd__ = __mul__ = __rmul__ = __sub__ = __rsub__ = __truediv__ = _used


def warpgroup_mma(
    a: Any, b: SharedTile, acc: Any, *, use_acc: bool = True, is_async: bool = False, **_: Any
) -> Any:
    if role().threads % 128:
        raise SimulationError("wgmma needs a role of whole warpgroups: four warps each")

    def compute() -> Tensor:
        left = a.read_by_hardware("wgmma") if isinstance(a, SharedTile) else a
        total = left.float() @ b.read_by_hardware("wgmma").float()
        if use_acc:
            total = total + (acc.evaluate() if isinstance(acc, Product) else acc)
        return tile(total)

    product = Product(compute)
    if scheduler().random.random() < 0.3:
        product.evaluate()
    if not is_async:
        for earlier in role().products:
            earlier.evaluate()
        return product.evaluate()
    role().products.append(product)
    scheduler().pause()
    return product


def warpgroup_mma_wait(num_outstanding: int = 0, deps: Sequence[Any] = ()) -> Any:
    scheduler().pause()
    products = role().products
    while len(products) > num_outstanding:
        product = products.pop(0)
        product.evaluate()
        product.retired = True
    results = []
    for dep in deps:
        # One that is still in flight goes on as it is, and raises when it is used as a tile.
        results.append(dep.evaluate() if isinstance(dep, Product) and dep.retired else dep)
    return results[0] if len(results) == 1 else tuple(results)


# --- global memory ----------------------------------------------------------------------------


def load(source: Pointer, mask: Any = None, other: Any = 0) -> Any:
    scheduler().pause()
    places, wanted = source.places(mask, "a load", reads=True)
    if wanted is None:
        values = source.region.read(places)
    elif bool(wanted.any()):
        values = source.region.read(places)
        values = torch.where(wanted, values, torch.as_tensor(other, dtype=values.dtype))
    else:  # the tensor may be empty
        values = torch.as_tensor(other, dtype=source.memory.dtype).expand(places.shape).clone()
    return tile(values) if values.dim() else values.item()


def store(target: Pointer, value: Any, mask: Any = None) -> None:
    value = torch.as_tensor(value).as_subclass(Tensor)
    places, wanted = target.places(mask, "a store", reads=False)
    value, places = torch.broadcast_tensors(value, places)
    if wanted is not None:
        wanted = wanted.expand(places.shape)
        value, places = value[wanted], places[wanted]
    target.memory[places] = value.to(target.memory.dtype)
    target.region.wrote(places)
    scheduler().pause()


def atomic_add(
    target: Pointer, value: Any, mask: Any = None, sem: str = "acq_rel", scope: str = "gpu"
) -> Any:
    scheduler().pause()
    places, wanted = target.places(mask, "an atomic", reads=True)
    if wanted is None:
        wanted = torch.ones_like(places, dtype=torch.bool)
    at = places[wanted]
    memory = target.memory
    before = memory[at].clone()
    if not torch.as_tensor(
        value
    ).any():  # a poll; the same answer twice: wait for another, so that a deadlock shows
        poll = (memory.data_ptr(), at.tolist(), before.tolist())
        if poll == role().last_poll:
            scheduler().pause(
                lambda: not torch.equal(memory[at], before), f"a change of flags {poll[1]}"
            )
            before = memory[at].clone()
        role().last_poll = (*poll[:2], before.tolist())
    added = torch.as_tensor(value, dtype=memory.dtype).as_subclass(Tensor).expand(places.shape)
    memory.index_add_(0, at.reshape(-1), added[wanted].reshape(-1))
    if not places.dim():
        return before.item()
    found = torch.zeros_like(places, dtype=memory.dtype)
    found[wanted] = before
    return tile(found)


def atomic_xchg(target: Pointer, value: int, sem: str = "acq_rel", scope: str = "gpu") -> Any:
    scheduler().pause()
    place, _ = target.places(None, "an atomic", reads=False)
    before = target.memory[place].item()
    target.memory[place] = value
    target.region.wrote(place)
    scheduler().pause()
    return before


def thread_barrier() -> None:
    scheduler().pause()
