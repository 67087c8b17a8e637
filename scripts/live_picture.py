"""Draw the README's moving picture: its program in a notebook of JupyterLab, as it runs.

    CHROMIUM=$(sh scripts/chromium.sh) python -m scripts.live_picture

1. run      the program in a real JupyterLab, in a headless Chromium
2. watch    take a picture of each step
3. animate  put the frames into one SVG, which shows one after the other; readers who prefer less motion see the last
"""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path

import nbformat
from playwright.sync_api import Page, sync_playwright

from tests.browser.lab import RUN_ALL, open_notebook, serve_lab

__all__ = ["animate", "main", "watch"]

ROOT = Path(__file__).parents[1]
WIDTH, HEIGHT = 940, 700
FRAME, LAST = 0.5, 4.0
"""Seconds for which a frame is shown, and the last one."""

STEPS = 12
"""More than in the README, so that there is something to watch."""


def watch(page: Page) -> list[tuple[float, str]]:
    """Run the notebook that the page has opened; return pictures in base64, each with how far from the top it begins.

    The first one shows the whole page, and the others what is below the cell: when the run begins, after each step, and
    when it has finished.
    """
    chromium = page.context.new_cdp_session(page)
    output = page.locator(".jp-OutputArea")

    def take(top: float) -> tuple[float, str]:
        clip = {"x": 0, "y": top, "width": WIDTH, "height": HEIGHT - top, "scale": 1}
        webp = {"format": "webp", "quality": 50, "clip": clip}
        return top, chromium.send("Page.captureScreenshot", webp)["data"]

    frames = [take(0)]
    page.evaluate(RUN_ALL)
    seen, told = None, ""
    while "finished" not in told:
        told = " ".join(output.all_text_contents())
        step = re.search(r"step \d+ of", told)
        if step and step[0] != seen:
            seen = step[0]
            page.wait_for_timeout(100)  # it draws the step a moment after it names it
            frames.append(take(output.first.evaluate("(output) => output.getBoundingClientRect().top")))
    page.wait_for_timeout(1000)
    return [*frames, take(frames[-1][0])]


def animate(frames: list[tuple[float, str]], width: int, height: int) -> str:
    """Return an SVG that shows pictures one after the other, as `watch` returns them; the first one stays below.

    >>> svg = animate([(0, "Zmlyc3Q="), (1, "bGFzdA==")], 4, 3)
    >>> svg.count("<image"), "animation: frame 4.5s" in svg
    (2, True)
    """
    seconds = FRAME * (len(frames) - 1) + LAST
    rule = "@keyframes {} {{ 0% {{ visibility: visible }} {:.3f}% {{ visibility: hidden }} }}"
    style = [
        f"image {{ visibility: hidden; animation: frame {seconds:g}s steps(1) infinite }}",
        rule.format("frame", 100 * FRAME / seconds),
        rule.format("last", 100 * LAST / seconds),
        "image:last-of-type { animation-name: last }",
        "image:first-of-type { animation: none; visibility: visible }",
        "@media (prefers-reduced-motion) { image { animation: none } image:last-of-type { visibility: visible } }",
    ]
    images = [
        f'<image y="{top:g}" width="{width}" height="{height - top:g}" style="animation-delay: {FRAME * i:g}s" '
        f'href="data:image/webp;base64,{frame}"/>'
        for i, (top, frame) in enumerate(frames)
    ]
    title = "JupyterLab: a cell trains with GPipe on four ranks, and the timeline below it grows step by step"
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">' + "\n".join(
        [f"<title>{title}</title>", "<style>", *style, "</style>", *images, "</svg>", ""]
    )


def main() -> None:
    """Run the README's program in JupyterLab, and write docs/pictures/live.svg."""
    program = (ROOT / "README.md").read_text(encoding="utf-8").split("```python\n")[1].split("```")[0]
    code = program.split("run.wait()")[0].replace("steps=4", f"steps={STEPS}").rstrip() + "\nrun"
    kernel = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        notebooks = Path(folder) / "notebooks"
        notebooks.mkdir()
        book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)], metadata=kernel)
        nbformat.write(book, notebooks / "live.ipynb")
        browser = playwright.chromium.launch(executable_path=os.environ["CHROMIUM"], args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
        with serve_lab(Path(folder)) as address:
            open_notebook(page, f"{address}/workspaces/live/tree/live.ipynb")
            for command in ("application:toggle-left-area", "application:toggle-mode"):
                page.evaluate("(command) => window.jupyterapp.commands.execute(command)", command)
            frames = watch(page)
        browser.close()
    path = ROOT / "docs" / "pictures" / "live.svg"
    path.write_text(animate(frames, WIDTH, HEIGHT), encoding="utf-8")
    print(f"{path.name}: {len(frames)} frames, {path.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
