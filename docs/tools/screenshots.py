"""Screenshots for the documentation: `python docs/tools/screenshots.py` writes docs/assets/*.png.

Draws the built-in Llama with `fxpar viz`, trains the demo for a few steps (two minutes; `--report FILE` takes the
report of a run that is there), opens both pages in a headless Chromium of 1440 x 900 in the light theme, and saves PNGs
of at most 256 colours. Needs selenium, Pillow, Chromium and its driver, which nothing else in the documentation does.
"""

from __future__ import annotations

import argparse
import io
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from PIL import Image
from selenium import webdriver
from selenium.webdriver.support.wait import WebDriverWait

ASSETS = Path(__file__).resolve().parent.parent / "assets"
SIZE = (1440, 900)
MOST_BYTES = 250_000
STRATEGIES = ("dp4", "dp2.tp2+sp", "pp2.tp2+zb_h1", "cp4")
_SETTLED_S = 1.5  # plots draw themselves after the page is ready


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--report", type=Path, help="report.html of a run")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = draw_model(Path(folder))
        report = given.report or train_demo(Path(folder))
        driver = start_browser(Path(folder) / "profile")
        try:
            take_all(driver, model, report)
        finally:
            driver.quit()


def draw_model(folder: Path) -> Path:
    """The page of the built-in Llama."""
    path = folder / "llama.html"
    words = ["viz", "llama", "--set", "layers=4", "-s", ",".join(STRATEGIES), "--tokens", "1024", "-o", str(path)]
    subprocess.run([sys.executable, "-m", "fxpar", *words], check=True)
    return path


def train_demo(folder: Path) -> Path:
    """The report of a short run."""
    words = ["train", "--demo", "--set", "run.steps=12", "--set", f"run.folder={folder}/run"]
    subprocess.run([sys.executable, "-m", "fxpar", *words], check=True)
    return folder / "run" / "report.html"


def start_browser(profile: Path) -> Any:
    chromium, service = shutil.which("chromium") or shutil.which("google-chrome"), shutil.which("chromedriver")
    if chromium is None or service is None:  # selenium would look for them on the network
        raise SystemExit("chromium and chromedriver must be on the path")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--force-device-scale-factor=1"):
        options.add_argument(argument)
    options.add_argument(f"--user-data-dir={profile}")
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(service))
    screen = {"width": SIZE[0], "height": SIZE[1], "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    driver.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": "light"}]}
    )
    return driver


def take_all(driver: Any, model: Path, report: Path) -> None:
    open_page(driver, model)
    pick_strategy(driver, "dp2.tp2+sp")
    shoot(driver, "viz_graph", "graph", unfold_layer)
    shoot(driver, "viz_mesh", "mesh", pick_weight)
    shoot(driver, "viz_timeline", "timeline")
    shoot(driver, "viz_memory", "memory")
    open_page(driver, report)
    shoot(driver, "run_report", "run")


def open_page(driver: Any, path: Path) -> None:
    driver.get(path.resolve().as_uri())
    WebDriverWait(driver, 30).until(lambda d: d.execute_script("return document.documentElement.dataset.ready"))


def pick_strategy(driver: Any, name: str) -> None:
    driver.find_element("xpath", f"//header//button[normalize-space()='{name}']").click()


def unfold_layer(driver: Any) -> None:
    """Open the first layer and its attention."""
    for name in ("layers.0", "layers.0.attention"):
        head = driver.find_element("css selector", f"[data-key$='{name}'] > .head")
        driver.execute_script("arguments[0].focus({preventScroll: true})", head)
        head.send_keys("\n")
        time.sleep(_SETTLED_S)


def pick_weight(driver: Any) -> None:
    driver.find_element("xpath", "//li/button[contains(., 'attention.q_proj')]").click()


def shoot(driver: Any, name: str, tab: str, prepare: Callable[[Any], None] | None = None) -> None:
    """Open a tab and save what is seen, without the rest of the page. Raises ValueError if the file grows too large."""
    driver.find_element("id", f"tab-{tab}").click()
    time.sleep(_SETTLED_S)
    if prepare is not None:
        prepare(driver)
        time.sleep(_SETTLED_S)
    picture = Image.open(io.BytesIO(driver.get_screenshot_as_png())).convert("RGB")
    path = ASSETS / f"{name}.png"
    picture.quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)
    if path.stat().st_size > MOST_BYTES:
        raise ValueError(f"{path.name} has {path.stat().st_size:,} bytes, more than {MOST_BYTES:,}")


if __name__ == "__main__":
    main()
