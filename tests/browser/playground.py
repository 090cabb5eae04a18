"""A real server with the project's own model and toy ones, and a real browser that looks at its page."""

import json
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, sync_playwright

from bertsmith.inference.embedded_models import default_model
from bertsmith.serve import playground
from bertsmith.serve.app import Application
from bertsmith.serve.server import listen, make_server
from bertsmith.serve.server_config import Limits, ServerConfig
from tests.tuning import SHORT

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
ARGUMENTS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
PANELS = (
    "fill",
    "answer",
    "classify",
    "choose",
    "entities",
    "next",
    "compare",
    "tokens",
    "attention",
    "senses",
    "models",
)
DESK = {"viewport": {"width": 1200, "height": 860}, "reduced_motion": "reduce", "color_scheme": "light"}
WINDOWS = {
    "desk": DESK,
    "phone": {**DESK, "viewport": {"width": 360, "height": 740}, "is_mobile": True, "has_touch": True},
}
THEMES = ("light", "dark")
PATIENCE = 15_000
"""Milliseconds; a busy machine is slow, a broken page is slower."""


@dataclass
class Visit:
    """A page that is open, and what it should not have done."""

    page: Page
    address: str
    complaints: list[str] = field(default_factory=list)
    strangers: list[str] = field(default_factory=list)
    openings: Iterator[int] = field(default_factory=count)

    def open(self, panel: str) -> None:
        """Show a panel as its link does, afresh."""
        # Where nothing but the part behind # differs a browser stays on the page.
        self.page.goto(f"{self.address}/?opening={next(self.openings)}#{panel}")
        self.settle(panel)

    def settle(self, panel: str) -> None:
        """Wait until the panel shows a result."""
        result = f"#panel-{panel} .result:not([aria-busy]) > *"
        self.page.wait_for_selector(result if panel != "models" else "#panel-models table")

    def text(self, selector: str) -> str:
        """What is written there, once it is."""
        return self.page.locator(selector).first.inner_text()


def default_shape() -> tuple[int, int]:
    """Layers and heads of the project's own model."""
    config = json.loads((default_model() / "config.json").read_text(encoding="utf-8"))
    return config["num_hidden_layers"], config["num_attention_heads"]


def tuned_models(lesson: Callable[..., Path]) -> dict[str, Path]:
    """The project's own model, and a toy one of each kind of task."""
    lessons = {"squad2": (), "sst2": (), "wnut17": ()}
    lessons |= {"stsb": SHORT, "swag": SHORT}  # any number of stars, and any choice, will do
    runs = {name: lesson(name, *settings) for name, settings in lessons.items()}
    return {"default": default_model(), **runs}


@contextmanager
def served(models: dict[str, Path], **settings: str) -> Iterator[str]:
    """The address of a server of these models."""
    application = Application(ServerConfig(models=models, device="cpu", **settings))
    listening: socket.socket = listen("127.0.0.1", 0)
    server = make_server(application, Limits())
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    with pytest.MonkeyPatch.context() as patch:
        # Tests open the page again and again: to ask for forty files each time took most of their time.
        patch.setattr(playground, "CACHING", "max-age=3600")
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


@contextmanager
def browsing() -> Iterator[Browser]:
    """A browser with a profile of its own."""
    if CHROMIUM is None:
        pytest.skip("no chromium here: make browser installs it")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(ARGUMENTS))
        yield browser
        browser.close()


def visit(context: BrowserContext, address: str) -> Visit:
    """A fresh page that notes every complaint of the console and every request to somewhere else."""
    context.set_default_timeout(PATIENCE)
    seen = Visit(context.new_page(), address)
    home = urlsplit(address).netloc

    def requested(url: str) -> None:
        if urlsplit(url.removeprefix("blob:")).netloc != home:  # blob: is what the page itself has made
            seen.strangers.append(url)

    seen.page.on("request", lambda request: requested(request.url))
    seen.page.on("pageerror", lambda error: seen.complaints.append(str(error)))
    seen.page.on(
        "console",
        lambda said: seen.complaints.append(said.text) if said.type in ("error", "warning") else None,
    )
    return seen
