"""A process that is stopped or cut off ends the others with one line; torchrun may start all of them anew."""

import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from threading import Event

import pytest

from bertsmith.training.distributed import World, in_world, start_world
from bertsmith.training.heartbeat import Counts, heartbeat, key_of, silence_text
from tests.worlds import PATIENCE_SECONDS, as_torchrun, meeting, run_processes, start


def test_a_process_whose_count_stands_still_is_silent():
    counts = Counts(patience=10.0)
    counts.hear({1: "1", 2: "1", 3: "1"}, now=100.0)
    counts.hear({1: "1", 2: "2", 3: "ended"}, now=109.0)
    assert counts.silent(110.0) == ([], 0.0)
    assert counts.silent(112.0) == ([1], 12.0)
    assert counts.silent(120.0) == ([1, 2], 11.0)  # what has ended is not silent
    assert silence_text([1, 2], 11.0).startswith("ranks 1, 2 are silent since ")


class Kept(dict[str, str]):
    """A store in this process, which may be out of reach."""

    reachable = True

    def set(self, key, value):
        self[key] = value

    def multi_get(self, keys):
        if not self.reachable:
            raise RuntimeError("no route to host")
        return [self[key].encode() for key in keys]


@pytest.mark.parametrize("reachable", [True, False])
def test_a_silent_process_is_told_of(reachable):
    store, told, happened = Kept({key_of(1): "1"}), [], Event()
    store.reachable = reachable

    def fail(what):
        told.append(what)
        happened.set()

    with heartbeat(store, 0, 2, 0.2, fail=fail):
        assert happened.wait(PATIENCE_SECONDS)
    assert told[0].startswith("rank 1 is silent since ") and "the same command resumes" in told[0]
    assert store[key_of(0)] == "ended"


def stopped_or_waiting(conversation, rank, port):
    as_torchrun(rank, port)

    def action(world: World) -> None:
        world.barrier()
        if rank:
            os.kill(os.getpid(), signal.SIGSTOP)
        world.barrier()

    in_world("cpu", action, patience=1.0)
    conversation.send("went on")


def test_a_stopped_process_ends_the_others():
    port = meeting()
    processes = [start(stopped_or_waiting, rank, port)[0] for rank in range(2)]
    try:
        processes[0].join(PATIENCE_SECONDS)
        assert processes[0].exitcode == 1 and processes[1].exitcode is None
    finally:
        for process in processes:
            process.kill()
            process.join()


def connected_and_killed(conversation, rank, port):
    as_torchrun(rank, port)
    conversation.send(start_world("cpu").sum([1.0]))
    os.kill(os.getpid(), signal.SIGKILL)


def again(rank, port):
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(rank)  # agents of several machines count differently
    as_torchrun(rank, port)
    return in_world("cpu", lambda world: world.sum([1.0]))


def test_processes_that_torchrun_starts_anew_do_not_look_for_those_before():
    port = meeting()
    for process, conversation in [start(connected_and_killed, rank, port) for rank in range(2)]:
        assert conversation.poll(PATIENCE_SECONDS) and conversation.recv() == [2.0]
        process.join()
    assert run_processes(2, again, port) == [[2.0], [2.0]]


PARTITION = """
set -e
ip link set lo up
ip link add near type veth peer name far
unshare -n sleep 600 & FAR=$!
trap 'kill $FAR $ZERO $ONE 2> /dev/null || true' EXIT
until [ "$(readlink /proc/$FAR/ns/net)" != "$(readlink /proc/self/ns/net)" ]; do sleep 0.05; done
ip link set far netns $FAR
ip addr add 10.9.0.1/24 dev near && ip link set near up
nsenter -t $FAR -n sh -c 'ip link set lo up; ip addr add 10.9.0.2/24 dev far; ip link set far up'
export MASTER_ADDR=10.9.0.1 MASTER_PORT WORLD_SIZE=2 LOCAL_WORLD_SIZE=1 LOCAL_RANK=0
RANK=0 GLOO_SOCKET_IFNAME=near "$PYTHON" "$PROGRAM" 2> zero.txt & ZERO=$!
RANK=1 GLOO_SOCKET_IFNAME=far nsenter -t $FAR -n "$PYTHON" "$PROGRAM" 2> one.txt & ONE=$!
until [ -e ready-0 ] && [ -e ready-1 ]; do kill -0 $ZERO; kill -0 $ONE; sleep 0.05; done
ip link set near down
set +e
wait $ZERO; echo "rank 0: $?"
wait $ONE; echo "rank 1: $?"
"""
"""Two hosts with a cable between them, which is pulled while both processes work."""
PROGRAM = """
import os
from pathlib import Path
from bertsmith.training.distributed import in_world

def work(world):
    world.barrier()
    Path("ready-" + os.environ["RANK"]).touch()
    while True:
        world.barrier()

in_world("cpu", work, patience=2.0)
"""


def namespaces_are_allowed() -> bool:
    """Whether this user may make a network of its own, as on most Linux machines and in few containers."""
    if not all(map(shutil.which, ("unshare", "nsenter", "ip"))):
        return False
    trial = "ip link add near type veth peer name far"
    return subprocess.run(["unshare", "-Urn", "sh", "-c", trial], capture_output=True).returncode == 0


def test_both_sides_of_a_network_that_went_down_say_who_is_silent(tmp_path: Path):
    if not namespaces_are_allowed():
        pytest.skip(
            "needs network namespaces without root (unshare, nsenter and ip), which this machine forbids"
        )
    (tmp_path / "program.py").write_text(PROGRAM)
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    settings = {"PYTHON": sys.executable, "PROGRAM": "program.py", "MASTER_PORT": str(port)}
    path = os.pathsep.join(each for each in sys.path if each)
    done = subprocess.run(
        ["unshare", "-Urn", "bash", "-c", PARTITION],
        cwd=tmp_path,
        env={**os.environ, **settings, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    told = [(tmp_path / name).read_text() for name in ("zero.txt", "one.txt")]
    assert done.stdout.splitlines() == ["rank 0: 1", "rank 1: 1"], (done.stderr, told)
    assert "bertsmith: rank 1 is silent since " in told[0] and "Traceback" not in told[0]
    assert "bertsmith: rank 0 is silent since " in told[1] and "Traceback" not in told[1]
