"""The command line's manners: quick help, exit codes, and one line for the user's mistakes."""

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from typer.main import get_command

import bertsmith
from bertsmith.cli.app import app, main
from bertsmith.cli.spelling import as_options
from bertsmith.core.errors import UserError
from tests import command_line
from tests.command_line import mistake

SOURCE = Path(bertsmith.__file__).parents[1]
HELP = ["-m", "bertsmith", "--help"]


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    """What a fresh interpreter answers to these arguments."""
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    return subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False
    )


@pytest.fixture
def exit_code_of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Runs the command line in this process, with one more verb where given, and tells its exit code."""

    def run(*arguments: str, verb: Callable[[], None] | None = None) -> int:
        if verb:
            monkeypatch.setattr(app, "registered_commands", [*app.registered_commands])
            app.command("verb")(verb)
        monkeypatch.setattr(sys, "argv", ["bertsmith", *arguments])
        with pytest.raises(SystemExit) as ending:
            main()
        return ending.value.code or 0

    return run


def cpu_seconds(*arguments: str) -> float:
    """User and system time of a fresh interpreter with these arguments."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    python(*arguments).check_returncode()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (after.ru_utime + after.ru_stime) - (before.ru_utime + before.ru_stime)


def test_help_lists_the_verbs() -> None:
    answer = python(*HELP)
    assert answer.returncode == 0
    assert "import-tf" in answer.stdout
    assert "demo" in answer.stdout


@pytest.mark.parametrize("verb", ["import-tf", "demo"])
def test_each_verb_teaches_by_example(verb, exit_code_of, capsys) -> None:
    assert exit_code_of(verb, "--help") == 0
    assert f"Example: bertsmith {verb}" in capsys.readouterr().out


def test_version_is_the_package_version(exit_code_of, capsys) -> None:
    assert exit_code_of("--version") == 0
    assert capsys.readouterr().out == f"bertsmith {bertsmith.__version__}\n"


def test_importing_the_package_imports_no_torch() -> None:
    answer = python("-c", "import sys, bertsmith; print('torch' in sys.modules)")
    assert answer.stdout == "False\n", answer.stderr


def test_help_imports_no_torch() -> None:
    program = (
        "import sys, atexit\n"
        "atexit.register(lambda: print('torch loaded:', 'torch' in sys.modules))\n"
        "sys.argv = ['bertsmith', '--help']\n"
        "from bertsmith.cli.app import main\n"
        "main()\n"
    )
    assert python("-c", program).stdout.endswith("torch loaded: False\n")


@pytest.mark.parametrize("words", [("tasks",), ("recipe", "show", "sst2")])
def test_what_there_is_to_fine_tune_is_listed_without_torch(words) -> None:
    program = (
        "import sys, atexit\n"
        "atexit.register(lambda: print('torch loaded:', 'torch' in sys.modules))\n"
        f"sys.argv = {['bertsmith', *words]!r}\n"
        "from bertsmith.cli.app import main\n"
        "main()\n"
    )
    assert python("-c", program).stdout.endswith("torch loaded: False\n")


def test_help_costs_at_most_35_percent_of_importing_torch() -> None:
    assert any(cpu_seconds(*HELP) <= 0.35 * cpu_seconds("-c", "import torch") for _ in range(3))


@pytest.mark.parametrize(("told", "found"), [(None, "10000"), ("0", "0")], ids=["ours", "the user's"])
def test_a_verb_finds_freed_memory_kept_unless_the_user_says_otherwise(
    told, found, exit_code_of, monkeypatch
) -> None:
    def verb() -> None:
        assert os.environ["MIMALLOC_PURGE_DELAY"] == found

    monkeypatch.setenv("MIMALLOC_PURGE_DELAY", told or "")
    if told is None:
        monkeypatch.delenv("MIMALLOC_PURGE_DELAY")
    assert exit_code_of("verb", verb=verb) == 0


def test_a_user_error_is_one_line_and_exit_code_2(exit_code_of, capsys) -> None:
    def verb() -> None:
        raise bertsmith.UserError("no such tag", where="a.conll:3", remedy="fix the line")

    assert exit_code_of("verb", verb=verb) == 2
    told = capsys.readouterr()
    assert told.err == "bertsmith: a.conll:3: no such tag; fix the line\n"
    assert told.out == ""


@contextmanager
def taken_by(handler: signal.Handlers, number: signal.Signals) -> Iterator[None]:
    """While it is open, a signal is ignored or not, whatever these tests were started with."""
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_stop_is_one_line_and_exit_code_130(exit_code_of, capsys, number) -> None:
    def verb() -> None:
        os.kill(os.getpid(), number)

    with taken_by(signal.SIG_DFL, signal.SIGHUP):
        before = [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGHUP)]
        assert exit_code_of("verb", verb=verb) == 130
        assert capsys.readouterr().err == "bertsmith: stopped\n"
        assert [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGHUP)] == before


def test_under_nohup_a_closed_terminal_stops_nothing(exit_code_of, capsys) -> None:
    def verb() -> None:
        os.kill(os.getpid(), signal.SIGHUP)
        print("done")

    with taken_by(signal.SIG_IGN, signal.SIGHUP):
        assert exit_code_of("verb", verb=verb) == 0
    assert capsys.readouterr().out == "done\n"


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGHUP])
def test_a_second_stop_does_not_cut_the_cleaning_up_short(exit_code_of, capsys, second) -> None:
    def verb() -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        finally:
            os.kill(os.getpid(), second)
            print("cleaned up")

    assert exit_code_of("verb", verb=verb) == 130
    assert capsys.readouterr().out == "cleaned up\n"


def test_a_forked_worker_ends_at_sigterm_as_ever(exit_code_of, capsys) -> None:
    endings = []

    def verb() -> None:
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(writing, b".")
            for _ in range(200):
                time.sleep(0.05)
            os._exit(1)
        os.read(reading, 1)  # Python forgets signals that come amid a fork
        os.kill(child, signal.SIGTERM)
        endings.append(os.waitpid(child, 0)[1])

    assert exit_code_of("verb", verb=verb) == 0
    assert [os.WIFSIGNALED(each) and os.WTERMSIG(each) for each in endings] == [signal.SIGTERM]
    assert capsys.readouterr().err == ""


def test_an_unknown_verb_is_the_users_mistake(exit_code_of, capsys) -> None:
    assert exit_code_of("forge-gold") == 2
    assert "forge-gold" in capsys.readouterr().err


def test_a_bug_keeps_its_traceback_and_exits_1() -> None:
    program = (
        "import sys\n"
        "from bertsmith.cli.app import app, main\n"
        "@app.command('verb')\n"
        "def verb(): raise ZeroDivisionError('ours')\n"
        "sys.argv = ['bertsmith', 'verb']\n"
        "main()\n"
    )
    answer = python("-c", program)
    assert answer.returncode == 1
    assert answer.stderr.startswith("Traceback")
    assert answer.stderr.endswith("ZeroDivisionError: ours\n")


def test_the_package_names_what_it_offers() -> None:
    assert {"load", "Bert", "Encoder", "Tokenizer", "PackedBatch", "UserError"} <= set(dir(bertsmith))
    assert bertsmith.UserError.__module__ == "bertsmith.core.errors"
    assert not hasattr(bertsmith, "anvil")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("prune --model m --data d --out o --heads 3", "--heads"),
        ("prune --model m", "Missing option '--data'"),
        ("recipe show", "NAME_OR_FILE"),
        ("look heads --nope", "No such option: --nope"),
    ],
)
def test_words_that_a_verb_does_not_take_are_one_line(capsys, words, told):
    line = mistake(capsys, *words.split())
    assert told in line and line.endswith(f"; see bertsmith {words.partition(' -')[0]} --help")


@pytest.mark.parametrize(
    ("words", "new"),
    [
        ("finetune sst2 --search 3", "--random"),
        ("predict --ensemble a", "--model A B"),
        ("tasks --search", ""),
    ],
)
def test_an_old_name_of_an_option_is_answered_with_the_new_one(capsys, words, new):
    line = mistake(capsys, *words.split())
    assert line.endswith(f"; use {new}" if new else "; see bertsmith tasks --help")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("features-table", "of the fine-tuning row only"),
        ("finetune", "more lengthen a finished run"),
        ("look direction", "with one side hidden"),
    ],
)
def test_a_shared_option_keeps_what_is_special_in_a_verb(capsys, words, told):
    assert told in " ".join(command_line.bertsmith(capsys, *words.split(), "--help").out.split())


@pytest.mark.parametrize(("verb", "ending"), [("prune", ""), ("finetune", "; use --columns a,b,c")])
def test_a_remedy_is_without_the_clause_of_an_option_that_the_verb_lacks(verb, ending):
    command = get_command(app).commands[verb]
    error = UserError("lacks a column", remedy="its columns are 'a'; use `columns=a,b,c`")
    assert error.spelled(as_options(command)).line() == f"lacks a column; its columns are 'a'{ending}"


def test_a_folder_that_is_not_a_run_is_told_without_options_of_another_verb(capsys, tmp_path):
    line = mistake(capsys, "checkpoint", "list", tmp_path)
    assert line.endswith("give the folder of a bertsmith pretrain run")


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        ("--minutes 3 --set sparse.gradual=0.5", "remove --minutes or sparse.gradual"),
        ("--set lora.rank=4", "use --set head.encoder=lora, or remove lora.rank"),
    ],
)
def test_a_remedy_is_words_that_can_be_typed(capsys, tmp_path, words, remedy):
    place = ("--data", tmp_path, "--out", tmp_path / "out")
    assert mistake(capsys, "finetune", "sst2", *place, *words.split()).endswith(f"; {remedy}")


@pytest.mark.parametrize(
    ("words", "told", "group"),
    [
        ("finetun", "No such command 'finetun'", "bertsmith"),
        ("look head", "No such command 'head'", "bertsmith look"),
        ("recipe --nope", "No such option: --nope", "bertsmith recipe"),
        ("--nope", "No such option: --nope", "bertsmith"),
    ],
)
def test_a_command_that_does_not_exist_is_one_line(capsys, words, told, group):
    line = mistake(capsys, *words.split())
    assert told in line and line.endswith(f"; see {group} --help")
