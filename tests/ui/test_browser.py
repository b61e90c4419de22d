"""The page in a real browser: nothing fails, names stay text, a phone does not scroll sideways, a live run grows."""

from __future__ import annotations

import json
import shutil
import threading
import time

import pytest

from erlangen.training import TrainConfig, run
from tests.browsers import needs_browser
from tests.ui.conftest import SCRIPT, SMALL

pytestmark = [pytest.mark.slow, needs_browser]


def view(driver, address: str, width: int = 1200, dark: bool = False) -> None:
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    driver.get("about:blank")  # another hash alone would not load the page again
    driver.get(address)


def until(driver, script: str, seconds: float = 40):
    """The value of ``script`` once it is true."""
    end = time.time() + seconds
    while not (found := driver.execute_script(f"return {script}")):
        assert time.time() < end, f"never true: {script}"
        time.sleep(0.1)
    return found


def unharmed(driver) -> None:
    assert [entry for entry in driver.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")] == []
    assert driver.execute_script("return window.hacked") is None


def test_runs_are_listed_compared_and_shown(browser, client):
    url = client.server.url
    view(browser, url)
    until(browser, "document.querySelectorAll('[data-run]').length === 4")
    until(browser, "!document.querySelector('#runs-table').textContent.includes('checking')")
    assert SCRIPT in browser.execute_script("return document.querySelector('#runs-table').textContent")
    told = {r["name"]: r for r in client.json("api/runs")["runs"]}["first"]
    cells = "[...[...document.querySelectorAll('#runs-table tbody tr')].find(r => r.textContent.startsWith('first')).cells]"
    said = browser.execute_script(f"return {cells}.slice(3, 5).map(c => c.textContent)")
    for value, text in zip((told["epsilon"], told["delta"]), said):
        assert value <= float(text) < 1.1 * value, "rounded up"
    for box in browser.find_elements("css selector", "[data-run]"):
        if box.get_attribute("data-run") in ("first", f"nested/{SCRIPT}"):
            box.click()
    browser.find_element("id", "compare-button").click()
    until(browser, "document.querySelectorAll('#compare-figures svg.main-svg').length >= 2")
    words = until(browser, "document.querySelector('[data-figure=progress] .legend')?.textContent")
    assert SCRIPT in words
    link = browser.find_element("link text", f"nested/{SCRIPT}")
    browser.execute_script("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", link)
    link.click()
    until(browser, "document.querySelectorAll('#run-figures [data-figure] .main-svg').length >= 5")
    assert browser.execute_script("return document.querySelector('h1').textContent") == f"nested/{SCRIPT}"
    addresses = browser.execute_script("return performance.getEntriesByType('resource').map(e => e.name)")
    assert all(address.startswith((url, "data:")) for address in addresses)
    unharmed(browser)


def test_the_calculator_answers_at_once_and_both_ways(browser, client):
    view(browser, client.server.url + "#calculator")
    until(browser, "document.querySelector('#answer-note').textContent === 'by PLD'")
    assert browser.execute_script("return document.querySelector('#answer-head').textContent") == "ε = 1.829"  # of 1.8284
    field = browser.find_element("id", "in-steps")
    field.clear()
    field.send_keys("4")
    until(browser, "document.querySelector('#command').textContent.includes('--steps 4 ')")
    until(browser, "document.querySelector('#answer-note').textContent === 'by PLD'")
    fewer = float(browser.execute_script("return document.querySelector('#answer-head').textContent").split("= ")[1])
    assert fewer < 1.829
    browser.find_element("css selector", "input[value=noise]").click()
    until(browser, "document.querySelector('#answer-head').textContent.startsWith('σ = ')")
    field = browser.find_element("id", "in-delta")
    field.clear()
    field.send_keys("-1")
    until(browser, "document.querySelector('#answer-words').textContent.startsWith('delta is -1')")


def test_names_of_runs_have_room_on_a_desk(browser, client):
    """They were folded after every ten letters, beside columns that were half empty."""
    view(browser, client.server.url, width=1280)
    assert browser.execute_script("return document.getElementById('compare-button').disabled"), "nothing is chosen yet"
    until(browser, "document.querySelectorAll('[data-run]').length === 4")
    until(browser, "!document.querySelector('#runs-table').textContent.includes('checking')")
    assert browser.execute_script("return document.querySelector('#runs-table tbody tr').cells[1].clientWidth") >= 180
    table = "document.querySelector('#runs-table')"
    assert browser.execute_script(f"return {table}.scrollWidth <= {table}.parentNode.clientWidth"), "and it needs no scrolling"


@pytest.mark.parametrize("page", ["runs", "run/first", "calculator"])
def test_a_phone_in_the_dark_does_not_scroll_sideways(browser, client, page):
    view(browser, f"{client.server.url}#{page}", width=360, dark=True)
    until(browser, "!document.querySelector('main > section:not([hidden])').textContent.includes('…')" if page == "calculator"
          else "document.querySelector('#page-runs:not([hidden]) tbody tr, #run-figures .main-svg')")  # fmt: skip
    time.sleep(0.5)
    assert browser.execute_script("return document.documentElement.scrollWidth") <= 360
    assert browser.execute_script("return getComputedStyle(document.body).backgroundColor") == "rgb(19, 21, 26)"


def test_a_live_run_grows_on_the_page(browser, client, folder):
    gate, config = threading.Event(), {**json.loads(SMALL.to_json()), "steps": 12, "evaluations": 12, "seed": 7}

    def watch(session, metrics):
        if session.step_count == 4:
            gate.wait(60)

    task = (TrainConfig.from_dict(config), folder / "growing")
    thread = threading.Thread(target=run.train, args=task, kwargs={"watch": watch})
    thread.start()
    try:
        view(browser, client.server.url + "#run/growing")
        until(browser, "document.querySelector('.state.running') && document.body.textContent.includes('4 of 12')")
        gate.set()
        until(browser, "document.querySelector('.state.finished') && document.body.textContent.includes('12 of 12')")
        until(browser, "document.querySelector('.statement .headline')")
    finally:
        gate.set()
        thread.join(60)
        shutil.rmtree(folder / "growing", ignore_errors=True)
