"""One browser, one server and one page for all tests of the playground, and views that need no server."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page

from bertsmith.insight.html_view import write_view
from tests.browser.playground import DESK, Visit, browsing, served, tuned_models, visit
from tests.tiny_runs import without_pictures
from tests.tuning import shared_lesson, toy_model  # noqa: F401


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    with browsing() as opened:
        yield opened


@pytest.fixture(scope="package")
def models(lesson: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tuned without pictures, and with encodings kept away from the user's own."""
    with pytest.MonkeyPatch.context() as patch, without_pictures():
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        return tuned_models(lesson)


@pytest.fixture(scope="package")
def address(browser: Browser, models: dict[str, Path]) -> Iterator[str]:
    with served(models) as where:
        yield where


@pytest.fixture(scope="package")
def opened(browser: Browser, address: str) -> Iterator[Visit]:
    with browser.new_context(**DESK) as context:
        made = visit(context, address)
        made.page.goto(address)  # whichever test comes first here
        yield made


@pytest.fixture
def seen(opened: Visit) -> Iterator[Visit]:
    """The page; whatever a test does with it, nothing may go wrong and nothing may leave this machine."""
    opened.complaints.clear()
    yield opened
    opened.page.unroute_all()
    assert opened.complaints == []
    assert opened.strangers == []


@pytest.fixture(scope="package")
def disconnected(browser: Browser) -> Iterator[Page]:
    """A page for the views of all tests, without a network."""
    with browser.new_context(**DESK, offline=True) as context:
        yield context.new_page()


@pytest.fixture
def view(disconnected: Page, tmp_path: Path) -> Iterator[Callable[[str, dict[str, Any]], Page]]:
    """Gives the page of a view, which may complain of nothing and ask nobody for anything."""
    said: list[str] = []
    asked: list[str] = []
    listeners: dict[Any, Callable[[Any], None]] = {
        "console": lambda line: said.append(line.text),
        "pageerror": lambda error: said.append(str(error)),
        "request": lambda request: asked.append(request.url),
    }
    disconnected.set_viewport_size(DESK["viewport"])
    disconnected.emulate_media(color_scheme=DESK["color_scheme"])
    for event, listener in listeners.items():
        disconnected.on(event, listener)

    def show(script: str, data: dict[str, Any]) -> Page:
        write_view(tmp_path / "view.html", script, data, title="A view")
        disconnected.goto((tmp_path / "view.html").as_uri())
        disconnected.wait_for_selector("main[data-ready]")
        return disconnected

    yield show
    for event, listener in listeners.items():
        disconnected.remove_listener(event, listener)
    assert said == []
    assert [url for url in asked if not url.startswith(("file:", "data:"))] == []
