"""The page in a real browser: nothing fails, every figure is drawn, light and dark, wide and narrow, mouse and keyboard."""

from __future__ import annotations

import dataclasses
import time

import pytest

from erlangen.report import build, read, render, write
from tests.browsers import needs_browser
from tests.report.conftest import FOLDER, SCRIPT

pytestmark = needs_browser

DRAWN = "return [...document.querySelectorAll('[data-figure]')].filter(e => e.querySelector('svg.main-svg')).length"
FIGURES = "return document.querySelectorAll('[data-figure]').length"


@pytest.fixture(scope="module")
def page(hostile, tmp_path_factory):
    """A report on names that try to be markup: what holds for it holds for others."""
    return write(build([read(hostile)]), tmp_path_factory.mktemp("page") / "report.html").as_uri()


def visit(driver, address: str, width: int = 1200, height: int = 1000, dark: bool = False) -> None:
    """Open the page and scroll through it, so that every figure is asked for."""
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    scheme(driver, dark)
    driver.get(address)
    for y in range(0, driver.execute_script("return document.documentElement.scrollHeight"), height // 2):
        driver.execute_script(f"window.scrollTo({{top: {y}, behavior: 'instant'}})")
        time.sleep(0.05)
    wanted, until = driver.execute_script(FIGURES), time.time() + 60
    while driver.execute_script(DRAWN) < wanted and time.time() < until:
        time.sleep(0.1)


def scheme(driver, dark: bool) -> None:
    features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


def complaints(driver) -> list:
    return [entry for entry in driver.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]


def test_every_figure_is_drawn_and_nothing_is_complained_of(browser, page):
    visit(browser, page)
    assert complaints(browser) == []
    assert browser.execute_script(DRAWN) == browser.execute_script(FIGURES) >= 6
    assert browser.execute_script("return window.hacked") is None
    assert FOLDER in browser.execute_script("return document.querySelector('h1').textContent")
    labels = browser.execute_script(
        "return [...document.querySelectorAll('#run1-confusion .xtick text')].map(e => e.textContent)"
    )
    assert labels[0].startswith("0</script>")  # shown as it was written, not read as markup
    assert browser.execute_script("return performance.getEntriesByType('resource').length") == 0


@pytest.mark.slow
def test_light_and_dark_follow_the_system_and_change_with_it(browser, page):
    visit(browser, page)
    script = (
        "const e = document.querySelector('#run1-training .xtick text');"
        "return [getComputedStyle(document.body).backgroundColor, getComputedStyle(e).fill]"
    )
    light = browser.execute_script(script)
    scheme(browser, dark=True)
    time.sleep(1.5)
    dark = browser.execute_script(script)
    assert light[0] == "rgb(247, 246, 242)"
    assert dark[0] == "rgb(19, 21, 26)"
    assert light[1] != dark[1]
    assert complaints(browser) == []


@pytest.mark.slow
@pytest.mark.parametrize("width", [320, 390, 768])
def test_a_phone_does_not_scroll_sideways(browser, page, width):
    visit(browser, page, width, 800)
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    wide = browser.execute_script(
        "return [...document.querySelectorAll('[data-figure]')]"
        ".filter(e => e.getBoundingClientRect().right > innerWidth + 1).length"
    )
    assert wide == 0
    assert browser.execute_script(DRAWN) == browser.execute_script(FIGURES)
    assert complaints(browser) == []


@pytest.mark.slow
def test_figures_answer_the_mouse_and_tables_the_keyboard(browser, page):
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.keys import Keys

    visit(browser, page)
    browser.execute_script(
        "document.querySelector('#run1-attacker').scrollIntoView({block: 'center', behavior: 'instant'})"
    )
    time.sleep(0.3)
    plot = browser.find_element("css selector", "#run1-attacker .nsewdrag")
    mouse = ActionChains(browser)
    for step in range(-4, 5):
        mouse.move_to_element_with_offset(plot, 20 * step, -20 * step).pause(0.1)
    mouse.perform()
    until = time.time() + 5
    while not browser.find_elements("css selector", "#run1-attacker .hoverlayer text") and time.time() < until:
        mouse.perform()
    assert browser.find_elements("css selector", "#run1-attacker .hoverlayer text")
    browser.execute_script("window.scrollTo(0, 0)")
    ActionChains(browser).send_keys(Keys.TAB).perform()
    assert browser.switch_to.active_element.get_attribute("class") == "skip"
    summary = browser.find_element("css selector", "figure summary")
    browser.execute_script("arguments[0].focus()", summary)
    ActionChains(browser).send_keys(Keys.ENTER).perform()
    assert summary.find_element("xpath", "..").get_attribute("open") is not None


@pytest.mark.slow
def test_the_policy_stops_a_script_that_slipped_through(browser, page, tmp_path):
    """A broken twin: the page with an inline script in it, as if escaping had failed. It must not run."""
    from pathlib import Path
    from urllib.parse import unquote, urlparse

    whole = Path(unquote(urlparse(page).path)).read_text()
    broken = tmp_path / "broken.html"
    broken.write_text(whole.replace("<main", f"{SCRIPT}<img src=x onerror='window.hacked=1'><main", 1))
    visit(browser, broken.as_uri())
    assert browser.execute_script("return window.hacked") is None
    assert any("Content Security Policy" in entry["message"] for entry in complaints(browser))


@pytest.mark.parametrize("width", [320, 400])
def test_axis_titles_fit_a_phone(browser, trained, tmp_path, width):
    """Layers of long names leave little room beside them for a title."""
    whole = render(build([read(trained)]))
    page = tmp_path / "report.html"
    page.write_text(whole.replace('"0.weight (', '"features.of.layer.0.weight ('))
    visit(browser, page.as_uri(), width)
    edges = browser.execute_script(
        "return [...document.querySelectorAll('[data-figure]')].flatMap(e => [...e.querySelectorAll('.xtitle, .ytitle, .y2title')]"
        ".map(t => [t.textContent, t.getBoundingClientRect(), e.getBoundingClientRect()])"
        ".map(([words, t, e]) => [words, t.left - e.left, e.right - t.right, t.top - e.top, e.bottom - t.bottom]))"
    )
    assert len(edges) > 6
    for words, *room in edges:
        assert min(room) > -0.5, words  # of a pixel
    apart = browser.execute_script(
        "return [...document.querySelectorAll('[data-figure]')]"
        ".filter(e => e.querySelector('.ytick text') && e.querySelector('.ytitle') && !e.querySelector('.heatmaplayer image'))"
        ".map(e => [e.id, Math.min(...[...e.querySelectorAll('.ytick text')].map(t => t.getBoundingClientRect().left))"
        " - e.querySelector('.ytitle').getBoundingClientRect().right])"
    )
    assert len(apart) > 3
    assert all(gap >= 0 for _, gap in apart), apart


@pytest.mark.parametrize("accuracy", [1.0, 0.9987])
def test_a_flat_curve_has_ticks_that_differ_and_end_at_all(browser, hostile, tmp_path, accuracy):
    run = read(hostile)
    history = [{**row, **({"test_accuracy": accuracy} if "test_accuracy" in row else {})} for row in run.history]
    flat = dataclasses.replace(run, history=history)
    visit(browser, write(build([flat]), tmp_path / "report.html").as_uri())
    labels = browser.execute_script(
        "return [...document.querySelectorAll('#run1-spending .ytick text')].map(e => e.textContent)"
    )
    assert len(labels) == len(set(labels)) > 1
    assert all(float(label.removesuffix("%")) <= 100 for label in labels)
