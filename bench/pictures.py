"""Remake the pictures and the printed outputs of README and docs, as far as a CPU can.

    python bench/pictures.py                     # `make pictures`: all of it, a few minutes on two cores
    python bench/pictures.py outputs screens     # some of it: outputs, screens, curves, looks, bars

Everything comes from the installed package: commands run in processes of their own, in an empty folder.
`outputs` runs each command after `$ ` in a console block and writes what it prints below it; a line `...`
there stands for lines left out. `screens` needs Chromium, `curves`, `looks` and `bars` matplotlib. Pictures
from a GPU (`cost_growth.py`, `profile_step.py`) and from corpora are not among them.
"""

import argparse
import html
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PICTURES = ROOT / "docs" / "pictures"
DOCUMENTS = (ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")))
BLOCK = re.compile(r"(?ms)^```console\n(.*?)^```$")
ELLIPSIS = "..."
LARGEST = 200_000
"""Bytes of a picture that comes with the repository."""


@dataclass(frozen=True)
class Shown:
    """A command of a console block, and the lines below it."""

    command: str
    lines: tuple[str, ...]

    @property
    def words(self) -> list[str]:
        """The arguments of `bertsmith`."""
        return shlex.split(self.command, comments=True)[1:]

    @property
    def runs_on(self) -> bool:
        """True if the command runs until it is stopped."""
        return self.words[:1] == ["serve"]

    def told(self, printed: str) -> tuple[str, ...]:
        """Return the lines of an output, cut where these lines are."""
        lines = tuple(line.rstrip() for line in printed.rstrip().splitlines())
        if ELLIPSIS not in self.lines:
            return lines
        at = self.lines.index(ELLIPSIS)
        after = len(self.lines) - at - 1
        return (*lines[:at], ELLIPSIS, *lines[len(lines) - after :])


def shown_in(block: str) -> list[Shown]:
    """Return the commands of a console block whose output is shown: those after `$ bertsmith`."""
    parts = re.split(r"(?m)^\$ ", block)[1:]
    split = [part.rstrip("\n").split("\n") for part in parts]
    return [Shown(first, tuple(rest)) for first, *rest in split if first.startswith("bertsmith ")]


def printed_by(shown: Shown, folder: Path) -> str:
    """Return what a command prints on its standard output; of a server the first line, then it is stopped."""
    call = [sys.executable, "-m", "bertsmith", *shown.words]
    if shown.runs_on:
        with serving(folder, *shown.words[1:]) as line:
            return re.sub(r":\d+ serves", ":8000 serves", line)
    environment = os.environ | {"COLUMNS": "80"}
    return subprocess.run(
        call, cwd=folder, env=environment, check=True, stdout=subprocess.PIPE, text=True
    ).stdout


@contextmanager
def serving(folder: Path, *words: str) -> Iterator[str]:
    """Start a server on a free port; yield the line that it prints, and stop it."""
    call = [sys.executable, "-m", "bertsmith", "serve", "--port", "0", *words]
    with subprocess.Popen(call, cwd=folder, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr is not None
            yield next(line for line in server.stderr if " serves " in line)
        finally:
            server.send_signal(signal.SIGTERM)
            server.communicate()


def outputs() -> None:
    """Write the printed outputs of README and docs again."""
    with tempfile.TemporaryDirectory() as folder:
        for document in DOCUMENTS:
            text = document.read_text(encoding="utf-8")
            if (again := BLOCK.sub(lambda found: _again(found[1], Path(folder)), text)) != text:
                document.write_text(again, encoding="utf-8")
                print(f"{document.relative_to(ROOT)}: outputs written again")


def _again(block: str, folder: Path) -> str:
    for shown in shown_in(block):
        lines = shown.told(printed_by(shown, folder))
        block = block.replace("\n".join((shown.command, *shown.lines)), "\n".join((shown.command, *lines)))
    return f"```console\n{block}```"


TERMINAL = """<!doctype html><meta charset="utf-8"><style>
body {{ margin: 0; width: 1600px; height: 700px; background: #dfe6e4; position: relative; overflow: hidden }}
.window {{ position: absolute; border-radius: 10px; overflow: hidden; box-shadow: 0 8px 30px #0004 }}
.bar {{ height: 30px; background: #c9cfcd; color: #444 }}
.bar {{ font: 13px/30px sans-serif; text-align: center }}
.bar::before {{ content: "● ● ●"; float: left; margin-left: 12px; color: #8b9593; letter-spacing: 2px }}
.terminal {{ left: 28px; top: 30px; width: 720px; background: #17211f }}
.terminal .bar {{ background: #26332f; color: #b9c7c2 }}
pre {{ margin: 0; padding: 16px 18px; height: 578px; color: #d7e2de }}
pre {{ font: 15.4px/1.5 "DejaVu Sans Mono", monospace }}
b {{ color: #7fd3b0 }}
i {{ color: #e9b872; font-style: normal }}
u {{ color: #5fb39a; text-decoration: none }}
.page {{ left: 776px; top: 30px; width: 796px; background: #fff }}
.page img {{ display: block; width: 796px; height: 610px; object-fit: cover; object-position: top }}
</style><div class="window terminal"><div class="bar">bertsmith in a terminal</div><pre>{terminal}</pre></div>
<div class="window page"><div class="bar">{address}</div><img src="{page}"></div>"""


def screens() -> None:
    """Draw README's first picture: its commands in a terminal beside the playground's page."""
    from playwright.sync_api import sync_playwright

    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    with tempfile.TemporaryDirectory() as name, sync_playwright() as browsers:
        folder = Path(name)
        commands = [shown for block in BLOCK.findall(readme) for shown in shown_in(block)]
        parts = [_coloured(each.command, printed_by(each, folder)) for each in commands]
        browser = browsers.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        with serving(folder) as line:
            address = line.split()[0]
            page = browser.new_page(viewport={"width": 1060, "height": 812})
            page.goto(f"{address}/#attention")
            page.wait_for_selector("#panel-attention .result:not([aria-busy]) > *")
            page.wait_for_timeout(1_000)  # until lines and small maps are drawn
            page.evaluate("window.scrollTo(0, 226)")
            page.screenshot(path=folder / "page.png")
        terminal = "\n\n".join(parts)
        document = folder / "screen.html"
        document.write_text(
            TERMINAL.format(terminal=terminal, page="page.png", address="http://127.0.0.1:8000"),
            encoding="utf-8",
        )
        screen = browser.new_page(viewport={"width": 1600, "height": 700})
        screen.goto(document.as_uri())
        screen.screenshot(path=folder / "screen.png")
        browser.close()
        keep(folder / "screen.png", PICTURES / "first-screen.png")


def _coloured(command: str, printed: str) -> str:
    lines = html.escape(printed.rstrip())
    lines = re.sub(r"[█▉▊▋▌▍▎▏]+", lambda bar: f"<u>{bar[0]}</u>", lines)
    lines = re.sub(r"\[(person|location)\]", r"<i>[\1]</i>", lines)
    folded = lines.replace(" serves ", " serves\n    ").replace(", ", ",\n    ")
    return f"<b>$ {html.escape(command, quote=False)}</b>\n{folded if 'serves' in lines else lines}"


def curves() -> None:
    """Draw the curves of the pre-training run of `bertsmith demo`."""
    with tempfile.TemporaryDirectory() as folder:
        call = [sys.executable, "-m", "bertsmith", "demo", "--out", f"{folder}/demo"]
        subprocess.run(call, check=True, stdout=subprocess.DEVNULL)
        keep(Path(folder, "demo", "pretrained", "curves.png"), PICTURES / "run-curves.png")


def looks() -> None:
    """Draw the attention of docs/look.md again."""
    with tempfile.TemporaryDirectory() as folder:
        text = "The animal was tired, so it did not cross the street."
        call = [sys.executable, "-m", "bertsmith", "look", "attention", text, "--out", "attention.png"]
        subprocess.run(call, cwd=folder, check=True, stdout=subprocess.DEVNULL)
        keep(Path(folder, "attention.png"), ROOT / "docs" / "look" / "attention-bertsmith-small.png")


def bars() -> None:
    """Draw the ratios of the first table of docs/performance.md, coloured by machine."""
    from matplotlib import pyplot

    text = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    rows = re.findall(r"(?m)^\| ([^|]+) \| ([^|]+) \| [^|]+ \| \*\*([\d.]+)\*\* \|", text)[::-1]
    machines = list(dict.fromkeys(machine for _, machine, _ in rows))[::-1]
    figure, axes = pyplot.subplots(figsize=(8.5, 0.22 * len(rows) + 0.8), layout="constrained")
    for machine, colour in zip(machines, ("#20566b", "#2a8c7b", "#c98a2b", "#8a5a83"), strict=True):
        chosen = [place for place, row in enumerate(rows) if row[1] == machine]
        ratios = [float(rows[place][2]) for place in chosen]
        drawn = axes.barh(chosen, ratios, color=colour, label=machine)
        axes.bar_label(drawn, [f"{ratio:.2f}" for ratio in ratios], padding=3, fontsize=8)
    axes.set_yticks(range(len(rows)), [name for name, *_ in rows])
    axes.set_ylim(-0.6, len(rows) - 0.4)
    axes.legend(loc="lower right")
    axes.axvline(1, color="#333", linewidth=1)
    axes.set_xlim(0, 1.08 * max(float(ratio) for *_, ratio in rows))
    axes.set_xlabel("speed in multiples of the fastest peer (the line at 1)")
    axes.tick_params(axis="y", labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    with tempfile.TemporaryDirectory() as folder:
        figure.savefig(Path(folder, "bars.png"), dpi=110)
        keep(Path(folder, "bars.png"), PICTURES / "ratios.png")


def keep(made: Path, kept: Path) -> None:
    """Put a picture into its place, with at most 256 colours and small enough, and print its size."""
    from PIL import Image

    with Image.open(made) as opened:
        picture = opened.convert("RGB")
    while True:
        picture.quantize(256, dither=Image.Dither.NONE).save(kept, optimize=True)
        if (size := kept.stat().st_size) <= LARGEST:
            break
        picture = picture.resize((picture.width * 4 // 5, picture.height * 4 // 5), Image.Resampling.LANCZOS)
    print(f"{kept.relative_to(ROOT)}: {size / 1000:.0f} kB, {picture.width} x {picture.height}")


PARTS = {each.__name__: each for each in (outputs, screens, curves, looks, bars)}


def main() -> None:
    """Remake the parts that are asked for, else all."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], metavar="|".join(PARTS))
    for name in parser.parse_args().parts or PARTS:
        PARTS[name]()


if __name__ == "__main__":
    main()
