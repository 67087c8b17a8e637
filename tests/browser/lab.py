"""What tests do in JupyterLab: open a notebook, find a cell, look at what it shows, type."""

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Locator, Page, expect

from tests import limits

RANKS = (
    "%load_ext mpkit",
    "%%ranks 4\nx = torch.ones(2) * rank\ncomm.all_reduce(x)\nprint('rank', rank, 'of', world_size)\n"
    "x * rank",
    "%%ranks\nif rank == 2:\n    x.nothing\nrank",
    "%%ranks\nimport time\nprint('asleep')\ntime.sleep(600)",
    "%%ranks 0,2\nx.sum()",
    "ranks.timeline()",
    "%%ranks\nworld_size",
)
"""The code of `ranks.ipynb`, which is there besides the kit's notebooks."""

ENDED = (
    """import time

import mpkit as mk
import torch
from mpkit.models import MLP


def wait(ctx, step):
    while step == 2:
        time.sleep(0.01)


cluster = mk.Cluster(ranks=2, device="cpu")
batch = (torch.zeros(8, 16), torch.zeros(8, dtype=torch.int64))
run = cluster.train(
    MLP(16, 4), [batch] * 9, mk.Plan.gpipe(2, 4), loss=torch.nn.functional.cross_entropy, optimizer=torch.optim.SGD,
    steps=9, on_step=wait,
)""",
)
"""The code of `ended.ipynb`, likewise; its run never ends by itself."""

TOUCH = """(name) => {
  const { contents } = window.jupyterapp.serviceManager;
  return contents.save(name, { type: 'file', format: 'text', content: '' });
}"""
"""Makes a file beside the notebooks, which a program waits for."""

RUN_ALL = """() => {
  window.ran = undefined;
  window.jupyterapp.commands.execute('notebook:run-all-cells').then((ok) => { window.ran = ok; });
}"""

CELLS = """() => {
  const notebook = window.jupyterapp.shell.currentWidget.content;
  return notebook.widgets.filter((cell) => cell.model.type === 'code').map((cell) => ({
    count: cell.model.executionCount,
    error: cell.model.outputs.toJSON().filter((output) => output.output_type === 'error'),
  }));
}"""


@contextmanager
def serve_lab(home: Path) -> Iterator[str]:
    """Serve a JupyterLab that keeps everything in a folder, asks nothing and nobody; yield its address.

    Its notebooks lie in the folder `notebooks`.
    """
    news = home / "settings" / "@jupyterlab" / "apputils-extension" / "notification.jupyterlab-settings"
    news.parent.mkdir(parents=True)
    quiet = {"checkForUpdates": False, "fetchNews": "false", "doNotDisturbMode": True}
    news.write_text(json.dumps(quiet), encoding="utf-8")
    folders = {
        "JUPYTER_CONFIG_DIR": "config", "JUPYTER_DATA_DIR": "data", "JUPYTER_RUNTIME_DIR": "runtime",
        "JUPYTERLAB_SETTINGS_DIR": "settings", "JUPYTERLAB_WORKSPACES_DIR": "workspaces",
        "IPYTHONDIR": "ipython",
    }  # fmt: skip
    server = subprocess.Popen(
        [
            *(sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root"),
            *("--ServerApp.ip=127.0.0.1", "--ServerApp.port=0"),
            *("--IdentityProvider.token=", "--ServerApp.password=", "--ServerApp.disable_check_xsrf=True"),
            *("--LabApp.expose_app_in_browser=True", f"--ServerApp.root_dir={home / 'notebooks'}"),
        ],
        env={**os.environ, **{name: str(home / folder) for name, folder in folders.items()}},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    said: list[str] = []
    address: list[str] = []
    ready = threading.Event()

    def listen() -> None:
        assert server.stderr is not None
        for line in server.stderr:
            said.append(line)
            if found := re.search(r"http://127\.0\.0\.1:\d+/lab", line):
                address.append(found[0])
                ready.set()

    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    try:
        assert ready.wait(limits.PROGRAM), "JupyterLab does not start:\n" + "".join(said)
        yield address[0]
    finally:
        server.terminate()  # it ends its kernels first
        try:
            server.wait(limits.EVENT)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
        listener.join()
        assert server.stderr is not None
        server.stderr.close()


def open_notebook(page: Page, address: str) -> None:
    """Open it, with a kernel that is ready."""
    page.goto(address)
    page.wait_for_function(
        "window.jupyterapp?.shell.currentWidget?.sessionContext?.session?.kernel?.status === 'idle'"
    )


def in_cell(page: Page, code: str) -> Locator:
    """The cell that has this code."""
    return page.locator(".jp-CodeCell").filter(
        has=page.locator(".jp-InputArea", has_text=code)
    ).first  # fmt: skip


def write(page: Page, cell: Locator, code: str) -> None:
    """Replace the code of a cell, from the keyboard's side."""
    look_at(cell)
    cell.locator(".cm-content").click()
    page.keyboard.press("Control+A")
    page.keyboard.insert_text(code)


def run(page: Page, cell: Locator) -> Locator:
    """Run a cell and wait until it is done; returns its last output, if it has any."""
    look_at(cell)
    cell.locator(".cm-content").click()
    before = cell.locator(".jp-InputPrompt").first.text_content()
    page.keyboard.press("Control+Enter")
    page.wait_for_function(
        "([prompt, before]) => /\\[\\d+\\]/.test(prompt.textContent) && prompt.textContent !== before",
        arg=[cell.locator(".jp-InputPrompt").first.element_handle(), before],
    )
    return cell.locator(".jp-OutputArea-output").last


def look_at(what: Locator) -> None:
    """Bring it to the middle of the page; JupyterLab lays out cells as they come into view, so until it stays there."""
    what.page.wait_for_function(
        """(element) => {
          element.scrollIntoView({ block: 'center' });
          const { top } = element.getBoundingClientRect();
          element.still = top === element.top ? element.still + 1 : 0;
          element.top = top;
          return element.still > 10; // frames
        }""",
        arg=what.element_handle(),
    )


def look_at_output(page: Page, code: str) -> None:
    """At what the cell with that code shows last."""
    output = in_cell(page, code).locator(".jp-OutputArea-output").last
    look_at(output)
    expect(output).to_be_visible()
