"""The chat page, as a browser shows it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.server.browser import CHROMIUM, Browser
from tests.server.live import LiveServer
from tests.server.test_lifecycle import slow_down

Make = Callable[..., LiveServer]
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")


@pytest.fixture(scope="module")
def shared_browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    browser = Browser(tmp_path_factory.mktemp("chromium"))
    yield browser
    browser.close()


@pytest.fixture
def browser(shared_browser: Browser) -> Iterator[Browser]:
    shared_browser.problems.clear()
    yield shared_browser
    assert shared_browser.problems == []


def ask(browser: Browser, text: str) -> None:
    browser.fill("#text", text)
    browser.click("#send")


def finished(browser: Browser) -> None:
    browser.wait("document.querySelector('#stop').hidden")


@needs_chromium
def test_a_chat_in_the_browser(make_server: Make, browser: Browser, tmp_path: Path) -> None:
    server = make_server()
    browser.open(server.url)
    browser.wait("document.querySelector('#model').innerText === 'tiny'")
    browser.fill("#max-tokens", "10")
    ask(browser, "first <b>question</b>")
    browser.wait("document.querySelectorAll('.assistant').length === 1")
    finished(browser)
    assert browser.text(".user") == "first <b>question</b>"  # text, not HTML
    status = browser.text("#status")
    assert re.search(r"\d+ tokens · [\d.]+ tokens/s · first after \d+ ms", status), status
    assert re.search(r"· 0 of \d+ prompt tokens cached", status), status
    ask(browser, "second")
    browser.wait("document.querySelectorAll('.assistant').length === 2")
    finished(browser)
    cached = re.search(r"(\d+) of (\d+) prompt tokens cached", browser.text("#status"))
    assert cached is not None
    assert 0 < int(cached[1]) < int(cached[2])  # the first turn was known
    browser.screenshot(tmp_path / "chat.png")
    browser.click("#reset")
    assert browser.run("document.querySelectorAll('.message').length") == 0
    server.assert_idle()


@needs_chromium
def test_the_stop_button(make_server: Make, browser: Browser) -> None:
    server = make_server()
    slow_down(server, 0.1)
    browser.open(server.url)
    x = server.llm.tokenizer.encode("x")[0]  # type: ignore[union-attr]
    assert x
    browser.fill("#max-tokens", "120")
    ask(browser, "long")
    browser.wait("document.querySelector('#status').innerText.includes('tokens/s')")
    assert not browser.run("document.querySelector('#stop').hidden")
    browser.click("#stop")
    finished(browser)
    assert "stopped" in browser.text(".assistant")
    server.assert_idle()


@needs_chromium
def test_errors_and_keys(make_server: Make, browser: Browser) -> None:
    server = make_server(config={"api_keys": ("the-key",)})
    browser.open(server.url)
    browser.wait("document.querySelector('#model').innerText.includes('needs an API key')")
    ask(browser, "hello")
    browser.wait("document.querySelector('.error') !== null")
    assert "no API key" in browser.text(".error")
    browser.fill("#key", "the-key")
    browser.run("document.querySelector('#key').dispatchEvent(new Event('change'))")
    browser.wait("document.querySelector('#model').innerText === 'tiny'")
    browser.fill("#max-tokens", "3")
    ask(browser, "x " * 200)
    browser.wait("document.querySelectorAll('.error').length === 2")
    ask(browser, "short")
    browser.wait("document.querySelectorAll('.assistant').length === 1")
    finished(browser)


def test_the_files_of_the_page(make_server: Make) -> None:
    with make_server().http() as http:
        page = http.get("/")
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        assert "default-src 'self'" in page.headers["content-security-policy"]
        for path in re.findall(r'(?:src|href)="(/[^"]+)"', page.text):
            assert http.get(path).status_code == 200
        assert "://" not in page.text  # nothing is loaded from elsewhere
        assert http.get("/page/../app.py").status_code == 404
