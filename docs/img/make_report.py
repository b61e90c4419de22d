"""Draws docs/img/report.png: the report of a run on a desk and on a phone at night.

    erlangen train --data digits --epsilon 3 --mechanism rep --model c8-tiny --lr 0.05 --out runs/demo
    python docs/img/make_report.py runs/demo

Needs chromium, chromium-driver (Debian's names) and selenium.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from pathlib import Path

from PIL import Image
from selenium import webdriver
from selenium.webdriver.chrome.service import Service

from erlangen.report import build, collect, write

GAP, HEIGHT = 24, 1292


def screenshot(page: Path, width: int, dark: bool, section: str | None, out: Path) -> Image.Image:
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--hide-scrollbars"):
        options.add_argument(argument)
    driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    size = {"width": width, "height": HEIGHT, "deviceScaleFactor": 1, "mobile": width < 600}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    theme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [theme]})
    driver.get(page.as_uri())
    for y in range(0, driver.execute_script("return document.documentElement.scrollHeight"), 500):
        driver.execute_script(f"window.scrollTo({{top: {y}, behavior: 'instant'}})")
        time.sleep(0.2)
    top = "0" if section is None else f"document.getElementById('{section}').getBoundingClientRect().top + scrollY - 60"
    driver.execute_script(f"window.scrollTo({{top: {top}, behavior: 'instant'}})")
    time.sleep(1)
    driver.save_screenshot(str(out))
    driver.quit()
    return Image.open(out).convert("RGB")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        page = write(build(collect([Path(sys.argv[1])])), Path(folder) / "report.html")
        desk = screenshot(page, 1080, False, None, Path(folder) / "desk.png")
        phone = screenshot(page, 400, True, "run1-section-noise", Path(folder) / "phone.png")
    both = Image.new("RGB", (desk.width + phone.width + GAP, HEIGHT), "#c9c7c0")
    both.paste(desk, (0, 0))
    both.paste(phone, (desk.width + GAP, 0))
    both.quantize(128, dither=Image.Dither.NONE).save(Path(__file__).with_name("report.png"), optimize=True)


if __name__ == "__main__":
    main()
