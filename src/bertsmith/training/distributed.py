"""Distributed training: the processes of a run, how they share the work, and the numbers they exchange.

Only this file and the heartbeat read torchrun's environment variables.
"""

import gc
import logging
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from secrets import randbits, token_hex
from traceback import format_exception
from typing import Any, Literal, TypeVar, cast

import torch
from torch import Tensor, distributed, nn
from torch.distributed import PrefixStore, Store, rendezvous  # type: ignore[attr-defined]
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

from bertsmith.core.errors import UserError
from bertsmith.model.encoder import layers_in
from bertsmith.training.heartbeat import heartbeat, torchrun_store

TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
PATIENCE = timedelta(days=30)
"""Timeout for waiting on the main process, which evaluates and writes alone; if it dies, all end at once."""

MEETING_SECONDS = 600.0
LOST = re.compile(
    r"connection (closed|reset) by peer|broken pipe|timed out|connection refused|ncclRemoteError", re.I
)
"""Messages of gloo and NCCL if another process does not answer."""
Patience = float | Literal["auto"]
Answer = TypeVar("Answer")
log = logging.getLogger("bertsmith")


class MainProcessFailed(SystemExit):
    """Ends the other processes without a message: the main process prints the error."""

    def __init__(self) -> None:
        super().__init__(2)


@dataclass(frozen=True, slots=True)
class World:
    """The processes of a run, seen from one of them; sums use the CPU and never wait for a GPU."""

    rank: int
    size: int
    local_rank: int
    """Number among the processes on the same machine."""
    device: torch.device
    group: distributed.ProcessGroup | None = None
    """Group for these exchanges; None for torch's default group."""

    @property
    def main(self) -> bool:
        """True in the process that writes files and prints messages."""
        return self.rank == 0

    def sum(self, values: Sequence[float]) -> list[float]:
        """Return the sum of each value over all processes, equal to the last bit in each of them."""
        if self.size == 1:
            return [float(value) for value in values]
        summed = torch.tensor(values, dtype=torch.float64)
        distributed.all_reduce(summed, group=self.group)
        return [float(value) for value in summed]

    def any(self, flag: bool) -> bool:
        """True if the flag is set in any process."""
        return self.sum([float(flag)])[0] > 0

    def gathered(self, rows: Tensor) -> tuple[Tensor, slice]:
        """Return the rows of all processes, in the order of ranks and without a graph, and the own slice.

        Processes may have different numbers of rows. They are exchanged on the run's device.
        """
        if self.size == 1:
            return rows.detach().clone(), slice(0, len(rows))
        own = [float(len(rows) * (rank == self.rank)) for rank in range(self.size)]
        counts = [int(count) for count in self.sum(own)]
        sent = rows.new_zeros((max(counts), *rows.shape[1:]))
        sent[: len(rows)] = rows.detach()
        parts = [torch.empty_like(sent) for _ in counts]
        distributed.all_gather(parts, sent)
        first = sum(counts[: self.rank])
        every = torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])
        return every, slice(first, first + len(rows))

    def broadcast(self, value: float) -> float:
        """Return the main process's value."""
        if self.size == 1:
            return value
        carried = torch.tensor([value], dtype=torch.float64)
        distributed.broadcast(carried, src=0, group=self.group)
        return float(carried)

    def on_main(self, action: Callable[[], Answer]) -> Answer | None:
        """Run an action in the main process and return its result, None elsewhere; if it fails, all end."""
        worked, answer = False, None
        try:
            answer = action() if self.main else None
            worked = True
        finally:
            worked = self.broadcast(float(worked)) > 0
        if not worked:
            raise MainProcessFailed
        return answer

    def main_first(self, action: Callable[[], Answer]) -> Answer:
        """Run an action in each process and return its result, in the main process first.

        The main process reports errors and warnings, and fills the caches that the others read.
        """
        answer = self.on_main(action)
        if self.main:
            return cast("Answer", answer)
        with _warnings_off():
            return action()

    def barrier(self) -> None:
        """Wait until every process has come this far."""
        self.sum([0.0])  # torch's own barrier would use the GPU


ALONE = World(rank=0, size=1, local_rank=0, device=torch.device("cpu"))


def start_world(device: Literal["auto", "cpu", "cuda"], patience: Patience = "auto") -> World:
    """Connect the processes that torchrun started; without torchrun, return this one alone."""
    rank, size, local_rank = _torchrun_ranks()
    chosen = _chosen_device(device, local_rank)
    if size == 1:
        return World(rank, size, local_rank, chosen)
    connection: dict[str, Any] = {"store": _meeting_store(rank, size), "rank": rank, "world_size": size}
    if chosen.type == "cuda":  # the timeout of gradient exchanges detects a GPU that hangs
        seconds = timedelta(seconds=patience_seconds(patience, chosen))
        distributed.init_process_group("cpu:gloo,cuda:nccl", timeout=seconds, **connection)
    else:
        distributed.init_process_group("gloo", **connection)
    # The other processes wait for the main one in this group, which has a long timeout.
    group = distributed.new_group(backend="gloo", timeout=PATIENCE)
    return World(rank, size, local_rank, chosen, group)


def _meeting_store(rank: int, size: int) -> Store:
    """Return a store that only the processes of this start use to find each other's addresses.

    Torchrun's store outlives a restart, and its agents may count restarts differently. So each process
    registers under a new name, and the main one replies to that name with the prefix of this start.
    """
    store: Store = next(rendezvous("env://"))[0]
    own, ends = token_hex(8), time.monotonic() + MEETING_SECONDS
    if rank:
        store.set(f"hello {rank}", own)
        start = store.get(f"answer {own}").decode()
        store.set(f"met {start} {rank}", "")
        return PrefixStore(start, store)
    missing = set(range(1, size))
    while missing and time.monotonic() < ends:
        for other in list(missing):
            if store.check([f"hello {other}"]):
                store.set(f"answer {store.get(f'hello {other}').decode()}", own)
            if store.check([f"met {own} {other}"]):
                missing.remove(other)
        time.sleep(0.02)
    if missing:
        what = f"rank {min(missing)} did not connect within {MEETING_SECONDS / 60:.0f} minutes"
        raise UserError(what, remedy="check the output of its machine, and start all of them again")
    return PrefixStore(own, store)


def stop_world() -> None:
    """Disconnect the processes, if they are connected."""
    if distributed.is_initialized():
        distributed.destroy_process_group()


def patience_seconds(patience: Patience, device: torch.device) -> float:
    """Return the seconds after which a silent process ends the others; auto: fewer for CPUs of one host."""
    if patience != "auto":
        return patience
    one_host = os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]
    return 60.0 if one_host and device.type == "cpu" else 300.0


def in_world(
    device: Literal["auto", "cpu", "cuda"], action: Callable[[World], Answer], patience: Patience = "auto"
) -> Answer:
    """Connect the processes that torchrun started, run an action in each, and return its result.

    A network that the action shares must be freed before they disconnect: otherwise gloo frees its resources
    with Python's lock held, and may wait for ever.
    """
    size = _torchrun_ranks()[1]
    try:
        world = start_world(device, patience)
        with _watched(world, patience):
            return action(world)
    except BaseException as error:
        if size > 1:
            _forget_frames(error)
            if lost := LOST.search(str(error)) if isinstance(error, RuntimeError) else None:
                what = f"the connection to another process of this run was lost ({lost[0]})"
                raise SystemExit(f"bertsmith: {what}: see its own output; the same command resumes") from None
        raise
    finally:
        if size > 1:
            stop_world()


def _watched(world: World, patience: Patience) -> AbstractContextManager[None]:
    """Return a context that ends this process if another one falls silent."""
    if world.size == 1:
        return nullcontext()
    seconds = patience_seconds(patience, world.device)
    store = PrefixStore(f"heartbeat {world.broadcast(float(randbits(50))):.0f}", torchrun_store(seconds))
    return heartbeat(store, world.rank, world.size, seconds)


def _forget_frames(error: BaseException) -> None:
    """Drop an error's tracebacks, which keep networks alive; add their text as a note."""
    if not isinstance(error, UserError | SystemExit | KeyboardInterrupt):
        error.add_note("".join(format_exception(error)))
    link: BaseException | None = error
    while link is not None:
        link.__traceback__ = None
        link = link.__cause__ or link.__context__
    gc.collect()


def refuse_several_processes(what: str) -> None:
    """Raise if torchrun started several processes for a job that runs in one."""
    _, size, _ = _torchrun_ranks()
    if size == 1:
        return

    def refuse() -> None:
        raise UserError(f"{what}, and {size} were started", remedy="start it without torchrun")

    in_world("cpu", lambda world: world.on_main(refuse))


def share_work(module: nn.Module, world: World, how: Literal["ddp", "fsdp"]) -> nn.Module:
    """Wrap a module so that backward averages gradients over full copies (ddp) or shards (fsdp).

    The loss is a sum over a global count, so the caller multiplies it by `world.size` to undo the average.
    The module must be on `world.device` with the same weights in every process. Its forward must compute the
    loss from every trained parameter, and return tensors or a tuple or dict of them.
    """
    if world.size == 1:
        return module
    if how == "fsdp":
        return _sharded(module, world)
    devices = [world.device] if world.device.type == "cuda" else None
    # Not static_graph: it learns the graph from the first backward, which must not be an accumulated one.
    return DistributedDataParallel(module, device_ids=devices, gradient_as_bucket_view=True)


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the module that `share_work` was given."""
    return module.module if isinstance(module, DistributedDataParallel) else module


def accumulating(module: nn.Module, *, last: bool) -> AbstractContextManager[None]:
    """Return a context for one micro-batch; only the step's last one exchanges gradients.

    `module` is the result of `share_work`.
    """
    if isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(last)
    elif isinstance(module, DistributedDataParallel) and not last:
        return module.no_sync()
    return nullcontext()


def gradient_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """Return the norm of all gradients over all processes."""
    norm = nn.utils.get_total_norm([each.grad for each in parameters if each.grad is not None])
    return whole(norm)


def held(tensor: Tensor) -> Tensor:
    """Return this process's part of a tensor, sharing its memory: all of it, or under FSDP some rows."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """Return the whole tensor, gathered from all processes; every process must call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def own_rows(values: Tensor, like: Tensor) -> Tensor:
    """Return the rows of `values` that belong to this process's rows of the tensor `like`."""
    if not isinstance(like, DTensor):
        return values
    first = first_row(like)
    return values[first : first + len(held(like))]


def first_row(tensor: Tensor) -> int:
    """Return the index in the whole tensor of the first row that this process holds."""
    if not isinstance(tensor, DTensor):
        return 0
    first, left = 0, tensor.shape[0]
    for dimension, placement in enumerate(tensor.placements):
        if isinstance(placement, Shard):
            assert placement.dim == 0, "FSDP shards rows"
            # Sharding follows torch.chunk: equal shards rounded up, the last ones smaller or empty.
            shard = -(-left // tensor.device_mesh.size(dimension))
            before = min(shard * tensor.device_mesh.get_local_rank(dimension), left)
            first, left = first + before, min(shard, left - before)
    return first


@contextmanager
def _warnings_off() -> Iterator[None]:
    """Log only errors: the main process has logged the warnings already."""
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)


def _sharded(module: nn.Module, world: World) -> nn.Module:
    mesh = init_device_mesh(world.device.type, (world.size,))
    # Each layer is listed once, even if it runs several times (ALBERT). The rest is one group at the root:
    # the word embeddings, which are used as the table and as the decoder, and layers that share weights,
    # because a weight belongs to one group.
    layers = layers_in(module)
    uses = Counter(parameter for layer in layers for parameter in layer.parameters())
    for layer in layers:
        if all(uses[parameter] == 1 for parameter in layer.parameters()):
            fully_shard(layer, mesh=mesh)
    fully_shard(module, mesh=mesh)
    return module


def _torchrun_ranks() -> tuple[int, int, int]:
    """Return rank, world size and local rank from torchrun's environment."""
    missing = [name for name in TORCHRUN if name not in os.environ]
    if len(missing) == len(TORCHRUN):
        return 0, 1, 0
    if missing:
        what = f"{' and '.join(missing)} not in the environment, but others of {', '.join(TORCHRUN)} are"
        raise UserError(what, remedy="start several processes with torchrun")
    rank, size, local_rank = (int(os.environ[name]) for name in TORCHRUN)
    return rank, size, local_rank


def _chosen_device(device: Literal["auto", "cpu", "cuda"], local_rank: int) -> torch.device:
    count = 0 if device == "cpu" else torch.cuda.device_count()
    if device == "cpu" or (device == "auto" and count == 0):
        return torch.device("cpu")
    if count == 0:
        raise UserError("torch sees no CUDA GPU", key="run.device", remedy="set it to auto or cpu")
    if local_rank >= count:
        what = f"more processes on this machine than its {count} GPU{'s' if count > 1 else ''}"
        raise UserError(what, remedy=f"start torchrun with `nproc_per_node={count}`")
    chosen = torch.device("cuda", local_rank)
    torch.cuda.set_device(chosen)
    return chosen
