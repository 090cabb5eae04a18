"""A server of several HTTP processes and one model process, which starts, watches and ends them.

Each HTTP process listens on its own socket on the same port (SO_REUSEPORT), and the kernel spreads
connections evenly. The model process keeps all of these sockets: if an HTTP process dies, connections wait in
its backlog for the process that replaces it.

HTTP processes are started by multiprocessing's fork server, a process that has imported everything and has no
other state: they start in a moment, share its memory, and inherit no thread and no GPU of the model process.
"""

import asyncio
import logging
import multiprocessing
import os
import signal
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing import forkserver
from multiprocessing.context import ForkServerProcess

import torch
import uvloop

from bertsmith.core.errors import UserError
from bertsmith.serve.channel import Kind
from bertsmith.serve.http_process import HttpProcessConfig, run_http_process
from bertsmith.serve.model_process import HttpChannel, ModelProcess
from bertsmith.serve.monitoring import LoopFailures
from bertsmith.serve.server import FLUSH_SECONDS, prepare_process
from bertsmith.serve.server_config import ServerConfig, share_of

MAX_DEFAULT_PROCESSES = 8
SWITCH_SECONDS = 0.00005
"""Seconds that the thread that receives requests may keep the GIL.

The model's thread releases it at each of its hundred kernels and needs it back. With a busy thread, 120 small
kernels took 6 and 8 ms with 0.5 ms here, and 1.0 and 1.4 ms with this value. CPU time per request is the
same.
"""
JOIN_SECONDS = 5.0
"""Seconds to wait for a process to end after its channel has ended."""
RESTART_SECONDS = 1.0
"""Seconds to wait after an HTTP process could not be started again."""
WATCH_SECONDS = 1.0
"""Seconds between two looks at an HTTP process."""
DEAF_LOOKS = 10
"""Consecutive looks without a sign of life after which an HTTP process is deaf. Looks are counted, not time:
none is taken while the whole machine is suspended, and fewer while it is too busy for this process, too."""

log = logging.getLogger("bertsmith.serve")


def default_http_processes(device: str) -> int:
    """Return 1 for a CPU, as the model needs its cores; half the cores for a GPU, which waits for HTTP."""
    is_gpu = torch.cuda.is_available() if device == "auto" else device.startswith("cuda")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(MAX_DEFAULT_PROCESSES, cores // 2)) if is_gpu else 1


class ProcessServer:
    """The model process of a server, with one HTTP process for each of these sockets."""

    def __init__(self, config: ServerConfig, listening: Sequence[socket.socket]) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([run_http_process.__module__])
        try:
            forkserver.ensure_running()  # it imports while the models are loaded
        except OSError as error:
            remedy = "make /tmp writable, or give --http-processes 1"
            raise UserError(f"cannot start HTTP processes ({error.strerror})", remedy=remedy) from error
        self._listening = list(listening)
        self._config = replace(config, limits=share_of(config.limits, len(listening)))
        self._models = ModelProcess(config, self._context, processes=len(listening))
        self._descriptions = self._models.descriptions()
        self._running: dict[HttpChannel, ForkServerProcess] = {}
        self._is_draining = False

    def run(self) -> None:
        """Answer requests until SIGTERM or Ctrl-C; a second signal ends the server at once."""
        prepare_process(SWITCH_SECONDS)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(LoopFailures())
        for each in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(each, self._stop)
        try:
            await asyncio.gather(*(self._keep(number) for number in range(len(self._listening))))
        finally:
            self._kill()
            self._models.close()

    async def _keep(self, number: int) -> None:
        """Keep an HTTP process running on a socket until the server drains."""
        has_served = False
        while not self._is_draining:
            was_ready, reason = await self._run_one(number)
            has_served = has_served or was_ready
            if self._is_draining:
                return
            if not has_served:
                what = f"an HTTP process ended before it accepted requests ({reason})"
                raise UserError(what, remedy="see its messages, or use --http-processes 1")
            fields = {"process": number, "reason": reason}
            log.error("an HTTP process has ended; another is started", extra={"fields": fields})
            if not was_ready:  # the others continue meanwhile
                await asyncio.sleep(RESTART_SECONDS)

    async def _run_one(self, number: int) -> tuple[bool, str]:
        """Run an HTTP process until it ends; return whether it accepted requests, and why it ended."""
        try:
            channel, process = await self._start(number)
        except (OSError, EOFError) as error:  # out of memory or descriptors, or the fork server has ended
            return False, os.strerror(error.errno) if isinstance(
                error, OSError
            ) and error.errno else "no process"
        is_deaf = await self._becomes_deaf(channel)
        if is_deaf:
            process.kill()
            channel.close()
            await channel.lost
        await asyncio.to_thread(process.join, JOIN_SECONDS)
        if process.is_alive():  # without a channel it is of no use, and another process will replace it
            process.kill()
            await asyncio.to_thread(process.join, JOIN_SECONDS)
        del self._running[channel]
        silence = f"silent for {DEAF_LOOKS * WATCH_SECONDS:g} s"
        return channel.is_ready, silence if is_deaf else f"exit status {process.exitcode}"

    async def _becomes_deaf(self, channel: HttpChannel) -> bool:
        """Wait until an HTTP process ends or is deaf; return True if it is deaf."""
        silent = 0
        while silent < DEAF_LOOKS:
            channel.is_silent = channel.is_ready  # a slow start is not silence
            await asyncio.wait([channel.lost], timeout=WATCH_SECONDS)
            if channel.lost.done():
                return False
            silent = silent + 1 if channel.is_silent else 0
        return True

    async def _start(self, number: int) -> tuple[HttpChannel, ForkServerProcess]:
        self._models.load.forget(number)
        near, far = socket.socketpair()
        # A copy: a signal may close the original before it is passed on.
        with far, self._listening[number].dup() as listening:
            config = HttpProcessConfig(
                number, self._config, self._descriptions, self._models.load, far, listening
            )
            process = self._context.Process(target=run_http_process, args=(config,), daemon=True)
            await asyncio.to_thread(process.start)  # it waits for the fork server's imports
        channel = HttpChannel(self._models, number)
        self._running[channel] = process
        await asyncio.get_running_loop().create_unix_connection(lambda: channel, sock=near)
        if self._is_draining:
            channel.send(Kind.DRAIN)
        return channel, process

    def _stop(self) -> None:
        """Begin to drain; at the second call, end at once."""
        if self._is_draining:
            self._kill()
            return
        self._is_draining = True
        for listening in self._listening:  # the HTTP processes have their own, and close them in time
            listening.close()
        for channel in self._running:
            channel.send(Kind.DRAIN)
        seconds = self._config.limits.drain_seconds + FLUSH_SECONDS
        asyncio.get_running_loop().call_later(seconds, self._kill)

    def _kill(self) -> None:
        for process in self._running.values():
            with suppress(ProcessLookupError):
                process.kill()
