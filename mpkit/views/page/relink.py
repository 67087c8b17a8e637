"""The section "Replay on another link" of a page: a recorded run whose link the reader chooses, without a kernel.

    program    what of the replay does not depend on the link (`timeline/replay/link_program.py`)
    links      the recorded one and others of the catalogue, by name

The script (`mpkit/views/browser/retimed.js`, `relink.js`) replays it as `mpkit.timeline.replay` does.
"""

from __future__ import annotations

import gzip
import json
from base64 import b64encode

from mpkit.common.safe_text import escape
from mpkit.devices.catalogue import hardware
from mpkit.timeline.replay.link_program import LinkProgram, link_values

__all__ = ["MACHINES", "relink_section"]

MACHINES = ("2x-titan-rtx-nvlink", "8x-a100-pcie", "8x-a100-nvlink", "8x-h100-nvlink")
"""Machines whose links can be chosen, beside the recorded one."""


def relink_section(program: LinkProgram) -> str:
    """Return the section as HTML, with the data of its script."""
    links = {f"as recorded: {program.link.name}": link_values(program.link)}
    own = next(iter(links))
    for machine in map(hardware, MACHINES):
        links[f"{machine.link.name}, of {machine.name}"] = link_values(machine.link)
    links["Ethernet, 10 Gbit/s"] = {"latency": 30e-6, "bandwidth": 1.25e9, "bus": {}, "ramp": 0.0}
    options = "".join(f'<option value="{escape(name)}">{escape(name)}</option>' for name in links)
    data = json.dumps({"program": program.values, "links": links, "own": own}, separators=(",", ":"))
    packed = b64encode(gzip.compress(data.encode(), 9, mtime=0)).decode()
    return (
        '<section class="card" id="relink"><h2>Replay on another link</h2><p class="intro">The ranks work as they did '
        "when the run was recorded, and every message and collective takes as long as it would on the link that you "
        "choose. So you see who waits for whom on a faster link or a slower one.</p>"
        '<div class="controls" role="group" aria-label="the link" hidden><div class="control">'
        f'<label for="relink-link">link</label><select id="relink-link" name="link">{options}'
        '<option value="">your own: set the numbers</option></select></div>'
        f"{_number('latency', 'latency per hop, µs', 0)}{_number('bandwidth', 'bandwidth, GB/s', 0.001)}</div>"
        '<p class="wrong" role="alert"></p><div class="relinked"></div>'
        f'<script type="text/plain" data-program>{packed}</script></section>'
    )


def _number(name: str, label: str, least: float) -> str:
    return (
        f'<div class="control"><label for="relink-{name}">{label}</label>'
        f'<input type="number" id="relink-{name}" name="{name}" min="{least}" step="any"></div>'
    )
