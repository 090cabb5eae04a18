import os
import subprocess

import pytest

from bertsmith.core.errors import UserError
from bertsmith.core.files import is_in_use, lock_for_this_process, locked, marked_in_use, open_lock_file
from tests.scripts import started

HOLD = """
import sys
from pathlib import Path
from bertsmith.core.files import lock_for_this_process, open_lock_file
handle = open_lock_file(Path({file!r}))
lock_for_this_process(handle)
print("held", flush=True)
sys.stdin.read()
"""


def test_a_lock_of_another_process_is_reported_at_once_and_is_free_when_that_was_killed(tmp_path):
    file = tmp_path / "deep" / ".lock"
    with started(tmp_path, HOLD.format(file=str(file)), stdin=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"held\n"
        handle = open_lock_file(file)
        with pytest.raises(OSError):
            lock_for_this_process(handle)
        other.kill()
        other.wait()
        lock_for_this_process(handle)
        os.close(handle)


def test_the_others_wait_for_a_lock(tmp_path):
    said = tmp_path / "said.txt"
    source = (
        "from pathlib import Path\n"
        "from bertsmith.core.files import locked\n"
        "print('asks', flush=True)\n"
        f"with locked(Path({str(tmp_path / 'lock')!r})):\n"
        f"    print(Path({str(said)!r}).read_text(), flush=True)\n"
    )
    with locked(tmp_path / "lock"):
        other = started(tmp_path, source)
        assert other.stdout.readline() == b"asks\n"
        said.write_text("written first")
    assert other.communicate(timeout=60)[0] == b"written first\n"


def test_a_folder_is_in_use_while_it_is_marked(tmp_path):
    assert not is_in_use(tmp_path)
    with marked_in_use(tmp_path):
        assert is_in_use(tmp_path)
    assert not is_in_use(tmp_path)


def test_a_place_that_cannot_be_written_is_reported(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        open_lock_file(tmp_path / "file" / ".lock")
