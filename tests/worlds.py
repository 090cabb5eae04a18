"""Real processes for tests: a function run by several of them, connected over gloo without any port."""

import multiprocessing
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

from bertsmith.training.distributed import World

PATIENCE_SECONDS = 300  # a busy machine is slow, and only a fault waits for ever
# Children of a server that has loaded everything already start in a moment (optimizers load dynamo at
# their first step), and unlike plain forks they inherit no threads of the test process.
LOADED = ["pytest", "hypothesis", "torch._dynamo", "torch.distributed.fsdp"]
LOADED += [
    "bertsmith.cli.app",
    "bertsmith.finetuning.finetune",
    "bertsmith.inference.loaded_model",
    "bertsmith.model.network",
    "bertsmith.training.checkpoint",
    "bertsmith.training.optimizers",
]
STORES: list[distributed.TCPStore] = []  # kept as long as the tests run
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(LOADED)


def run_world(size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What `function(world, *arguments)` returns in each of `size` connected processes, by rank."""
    with tempfile.TemporaryDirectory() as folder:
        return run_processes(size, _connected, Path(folder) / "store", size, function, arguments)


def in_turn(world: World, jobs: list[tuple[Any, ...]]) -> list[Any]:
    """What each `function(world, *arguments)` returns: one start of processes for several functions."""
    return [function(world, *arguments) for function, *arguments in jobs]


def meeting() -> int:
    """The port of a store for one start of two processes, open already: nobody can take it before them."""
    store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    STORES.append(store)
    return store.port


def as_torchrun(rank: int, port: int) -> None:
    """Set in this process, one of two, what torchrun would; the store is the starter's."""
    places: dict[str, Any] = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
    places |= {"MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in places.items()})
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_USE_AGENT_STORE": "True"})
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"


def run_processes(size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What `function(rank, *arguments)` returns in each of `size` processes, by rank."""
    started = [start(_answering, function, rank, arguments) for rank in range(size)]
    try:
        answers = [_answer(conversation) for _, conversation in started]
    finally:
        for process, _ in started:
            process.kill()
            process.join()
    failures = [text for failed, text in answers if failed]
    assert not failures, "\n".join(failures)
    return [value for _, value in answers]


def start(function: Callable[..., Any], *arguments: Any) -> tuple[Any, Connection]:
    """A process that runs `function(conversation, *arguments)`, and our end of the conversation."""
    _start_server()
    ours, theirs = FORKS.Pipe()
    process = FORKS.Process(target=function, args=(theirs, *arguments), daemon=True)
    process.start()
    theirs.close()
    return process, ours


def _start_server() -> None:
    """Start the server if it does not run; until Python 3.12 it would not look where this process does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(path or str(Path.cwd()) for path in sys.path))
        forkserver.ensure_running()


def _answer(conversation: Connection) -> tuple[bool, Any]:
    if not conversation.poll(PATIENCE_SECONDS):
        return True, "no answer in time"
    try:
        return conversation.recv()
    except EOFError:
        return True, "the process died without a word"


def _answering(conversation: Connection, function: Callable[..., Any], rank: int, arguments: Any) -> None:
    torch.set_num_threads(1)
    try:
        conversation.send((False, function(rank, *arguments)))
    except BaseException:
        conversation.send((True, f"rank {rank}: {traceback.format_exc()}"))
        raise


def _connected(rank: int, store: Path, size: int, function: Callable[..., Any], arguments: Any) -> Any:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    distributed.init_process_group(
        "gloo", store=distributed.FileStore(str(store), size), rank=rank, world_size=size
    )
    answer = function(World(rank, size, rank, torch.device("cpu")), *arguments)
    distributed.destroy_process_group()
    return answer
