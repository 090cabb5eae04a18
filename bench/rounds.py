"""What every speed benchmark shares: forms tried out, contenders in turn, one table, one JSON file."""

import argparse
import gc
import itertools
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
import transformers
from torch.nn.attention import SDPBackend, sdpa_kernel

transformers.utils.logging.disable_progress_bar()
transformers.utils.logging.set_verbosity_error()  # a fresh head is no news here
Round = Callable[[], float]
"""Does one round, waits for its device, and says how much it got through: tokens, texts or examples."""
Form = TypeVar("Form")
BROKEN = (ImportError, NotImplementedError, RuntimeError, OSError, ValueError, AttributeError, TypeError)
"""What a form of the peer that does not run here may raise; the others go on."""


def parser_of(description: str) -> argparse.ArgumentParser:
    """A command line with what all of them have."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"])
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each contender, in turn")
    parser.add_argument("--json", type=Path, help="a file for all figures, written anew after every row")
    return parser


def preferring_cudnn(preferred: bool) -> AbstractContextManager[Any]:
    """Where SDPA takes cuDNN's attention before any other, if that is wanted."""
    if not preferred:
        return nullcontext()
    others = (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)
    preference: AbstractContextManager[Any] = sdpa_kernel(
        [SDPBackend.CUDNN_ATTENTION, *others], set_priority=True
    )
    return preference


def wait_for(device: str) -> None:
    """Wait until a GPU has done what it was given."""
    if device == "cuda":
        torch.cuda.synchronize()


def clock_of(device: str) -> Callable[[], float]:
    """Time on the clock or, on a CPU, which others use as well, that of this process; both count seconds."""
    return time.process_time if device == "cpu" else time.perf_counter


def time_unit(device: str) -> str:
    """What `clock_of` counts, for a table."""
    return "CPU-second" if device == "cpu" else "second"


def forget() -> None:
    """Free the memory and the compiled code of what was tried before."""
    gc.collect()
    torch.compiler.reset()  # or a second shape would become a dynamic, slower graph
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def rate_of(take: Round, clock: Callable[[], float] = time.perf_counter) -> float:
    """How much a second one round gets through."""
    begin = clock()
    amount = take()
    return amount / (clock() - begin)


def in_turn(
    contenders: Mapping[str, Round], rounds: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, list[float]]:
    """The rates of contenders that take turns, so that what slows the machine down slows all of them."""
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    gc.collect()
    gc.freeze()  # a collection of all that compilers left behind would fall into some rounds only
    try:
        for _, (name, take) in itertools.product(range(rounds), contenders.items()):
            rates[name].append(rate_of(take, clock))
    finally:
        gc.unfreeze()  # or nobody would free the contenders
    return rates


def add_form(parser: argparse.ArgumentParser) -> None:
    """The option that narrows what is tried; a peer's form takes half a minute to compile."""
    what = "try only forms of the peer with this in their name, such as 'a mask of ones'"
    parser.add_argument("--form", default="", help=what)


def narrowed(forms: Sequence[Form], named: str) -> list[Form]:
    """Those that have this in their name."""
    if found := [form for form in forms if named in str(form)]:
        return found
    raise SystemExit(f"--form {named!r}: it is in none of {'; '.join(map(str, forms))}")


def fastest(
    forms: Sequence[Form],
    make: Callable[[Form], Round],
    rates: dict[str, float],
    clock: Callable[[], float] = time.perf_counter,
) -> Form:
    """The fastest of several forms of a peer, by one round after one that warms up; known ones stay known.

    Whoever takes part in rounds is made anew: all code that was compiled is forgotten between two forms. If
    there is only one, nothing has to be tried.
    """
    if len(forms) == 1:
        forget()
        return forms[0]
    for form in forms:
        if str(form) in rates:
            continue
        begin = time.perf_counter()
        forget()
        try:
            take = make(form)
            take()
            rates[str(form)] = rate_of(take, clock)
            told = f"{rates[str(form)]:,.0f}/s"
        except BROKEN as error:
            rates[str(form)] = 0.0
            told = f"does not run ({type(error).__name__}: {str(error)[:120]!r})"
        print(f"  peer, {form}: {told}, tried for {time.perf_counter() - begin:.0f} s", flush=True)
        take = None  # type: ignore[assignment]  # its memory is wanted for the next
    forget()
    best = max(forms, key=lambda form: rates[str(form)])
    if not rates[str(best)]:
        raise SystemExit("no form of the peer runs here")
    return best


@dataclass
class Results:
    """The rows of a script, printed as they come, in a file that grows with them."""

    file: Path | None
    unit: str
    time_unit: str = "second"
    rows: list[dict[str, Any]] = field(default_factory=list)

    def add(self, work: str, rates: Mapping[str, Sequence[float]], **facts: Mapping[str, Any]) -> None:
        """A row for each contender: medians, spread, how many times as fast ours is, and facts by name."""
        ours = statistics.median(rates["ours"]) if "ours" in rates else None
        print(f"\n{work}, {self.unit} a {self.time_unit}\n", flush=True)
        print(f"| side | median | lowest to highest | ours / it | {' | '.join(facts)} |")
        print("|---" * (4 + len(facts)) + "|")
        for name, values in rates.items():
            middle = statistics.median(values)
            row = {"work": work, "side": name, "unit": f"{self.unit} a {self.time_unit}", "median": middle}
            row |= {"lowest": min(values), "highest": max(values), "rounds": len(values)}
            row["ours / it"] = None if ours is None else round(ours / middle, 3)
            row |= {fact: by_name.get(name) for fact, by_name in facts.items()}
            self.rows.append(row)
            ratio = "" if ours is None else f"{ours / middle:.2f}"
            cells = [name, _number(middle), f"{_number(min(values))} to {_number(max(values))}", ratio]
            print(f"| {' | '.join([*cells, *(_text(row[fact]) for fact in facts)])} |", flush=True)
        self.write()

    def write(self, **others: Any) -> None:
        """The file as it is now, with the machine and the command that made it."""
        if self.file is None:
            return
        content = {"command": " ".join(sys.argv), "machine": machine(), "rows": self.rows, **others}
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self.file.write_text(json.dumps(content, indent=1, default=str) + "\n", encoding="utf-8")


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    versions["cudnn"] = torch.backends.cudnn.version() if gpu else None
    return {"gpu": gpu, "cpu": platform.processor() or platform.machine(), **versions}


def save(figure: Any, picture: Path) -> None:
    """Write a picture of matplotlib, which is wanted only for drawing."""
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=110)
    print(f"drawn: {picture}", flush=True)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _text(value: Any) -> str:
    return "" if value is None else _number(value) if isinstance(value, float) else str(value)
