"""Run the notebooks and keep their outputs as pictures, for readers without a kernel, such as on GitHub.

    make notebooks                                        all tutorials
    make notebooks ARGS=notebooks/04-zero.ipynb           one of them

Widgets and charts become PNGs, drawn by the Chromium of the browser tests; the state of widgets is dropped. Cells keep
their ids and tags; `tests/pages/test_tutorials.py` compares what cells tagged "exact" print with what is stored here.
"""

from __future__ import annotations

import os
import re
import shutil
import struct
import sys
import zlib
from base64 import b64decode, b64encode
from html import escape, unescape
from pathlib import Path
from typing import Any

import nbformat
import numpy as np
from nbclient import NotebookClient
from playwright.sync_api import Page, sync_playwright
from plotly.offline import get_plotlyjs

ROOT = Path(__file__).parents[1]
NOTEBOOKS = ROOT / "notebooks"
WIDGET, PLOTLY = "application/vnd.jupyter.widget-view+json", "application/vnd.plotly.v1+json"


def store(path: Path, page: Page) -> None:
    """Run one notebook, and write it with its outputs."""
    book = nbformat.read(path, as_version=4)
    place = {"metadata": {"path": str(path.parent)}}
    NotebookClient(book, timeout=600, resources=place, store_widget_state=False).execute()
    book.metadata.pop("widgets", None)
    book.metadata["language_info"] = {"name": "python"}
    for cell in book.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs = [kept for output in cell.outputs for kept in stills(output, page)]
    nbformat.write(book, path)
    print(f"{path.name}: {path.stat().st_size / 1e3:.0f} kB")


def stills(output: Any, page: Page) -> list[Any]:
    """Return the output in a form that needs no kernel: nothing if nothing is left of it, a picture with its words."""
    if output.output_type == "stream":
        # Cells have file names that depend on process and content: replace them.
        output.text = re.sub(r'"?/\S*/ipykernel_\d+/\d+\.py"?', "<a cell>", output.text)
    if output.output_type not in ("display_data", "execute_result"):
        return [output]
    data = output.data
    html = data.get("text/html", "")
    if PLOTLY in data:
        image = chart(data[PLOTLY], page)
    elif WIDGET in data:
        if not html:
            return []
        image = picture(html, page)
    elif html.startswith("<img "):  # GitHub leaves these out
        image = picture(html, page)
    else:
        return [output]
    plain = data.get("text/plain") or title_of(data.get(PLOTLY, {})) or "a chart"
    words = "; ".join(unescape(alt) for alt in re.findall(r'<img alt="([^"]*)"', html)) or plain
    output.data = {"image/png": image, "text/plain": plain}
    output.metadata["image/png"] = {"alt": words.splitlines()[0]}
    return [output, in_words(words)]


def title_of(figure: dict[str, Any]) -> str:
    """Return the title of a plotly figure; "" if it has none."""
    return str(figure.get("layout", {}).get("title", {}).get("text", ""))


def in_words(words: str) -> Any:
    """Return an output that tells a picture in words: most viewers of stored notebooks leave out its alt text."""
    lines = escape(words, quote=False)
    return nbformat.v4.new_output(
        "display_data",
        {
            "text/html": f"<details><summary>The picture in words</summary><pre>{lines}</pre></details>",
            "text/plain": "",
        },
    )


def picture(html: str, page: Page) -> str:
    """Render HTML as a browser draws it, as a PNG in base64."""
    style = "body{margin:0;background:#fff;font:14px system-ui,'DejaVu Sans',sans-serif} img{display:block}"
    page.set_content(f"<!doctype html><meta charset=utf-8><style>{style}</style><body><main>{html}</main>")
    page.wait_for_function("[...document.images].every((image) => image.complete)")
    return small_png(page)


def chart(figure: dict[str, Any], page: Page) -> str:
    """Render a plotly figure as a PNG in base64."""
    page.set_content("<!doctype html><body style='margin:0'><main></main>")
    page.add_script_tag(content=get_plotlyjs())
    draw = """({ data, layout }) => Plotly.newPlot(
      document.querySelector('main'), data, { ...layout, width: 860 }, { staticPlot: true }).then(() => true)"""
    page.evaluate(draw, figure)
    return small_png(page)


def small_png(page: Page) -> str:
    """Take a picture of the page as a PNG with 256 colours: a third of the bytes, with no visible difference."""
    shot = b64encode(page.locator("main").screenshot(animations="disabled")).decode()
    width, height, raw = page.evaluate(PIXELS, shot)
    pixels = np.frombuffer(b64decode(raw), np.uint8).reshape(-1, 4)[:, :3].astype(np.int32)
    colours, index, counts = np.unique(pixels, axis=0, return_inverse=True, return_counts=True)
    palette = colours[np.argsort(-counts)[:256]]
    nearest = ((colours[:, None] - palette[None]) ** 2).sum(axis=2).argmin(axis=1).astype(np.uint8)
    rows = nearest[index.reshape(height, width)]
    lines = np.hstack([np.zeros((height, 1), np.uint8), rows])  # each row begins with its filter: 0, none

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)  # 8 bits per pixel: palette indices
    parts = {
        b"IHDR": head,
        b"PLTE": palette.astype(np.uint8).tobytes(),
        b"IDAT": zlib.compress(lines.tobytes(), 9),
        b"IEND": b"",
    }
    return b64encode(
        b"\x89PNG\r\n\x1a\n" + b"".join(chunk(kind, data) for kind, data in parts.items())
    ).decode()


PIXELS = """async (png) => {
  const image = new Image();
  image.src = `data:image/png;base64,${png}`;
  await image.decode();
  const context = new OffscreenCanvas(image.width, image.height).getContext('2d');
  context.drawImage(image, 0, 0);
  const { data } = context.getImageData(0, 0, image.width, image.height);
  let text = '';
  for (let i = 0; i < data.length; i += 32768) text += String.fromCharCode(...data.subarray(i, i + 32768));
  return [image.width, image.height, btoa(text)];
}"""


def main() -> None:
    """Store the outputs of the given notebooks, or of all."""
    chromium = os.environ.get("CHROMIUM") or shutil.which("chromium")
    if not chromium:
        sys.exit("no Chromium: set CHROMIUM to one; scripts/chromium.sh finds or installs it")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 900, "height": 700})
        for path in [Path(name) for name in sys.argv[1:]] or sorted(NOTEBOOKS.glob("*.ipynb")):
            store(path, page)
        browser.close()


if __name__ == "__main__":
    main()
