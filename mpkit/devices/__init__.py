"""Devices, the links between them, and what operations cost there.

In     the name of a machine, or what was measured on one.
Out    `Hardware`: the seconds of an operation, a message and a collective; the devices of this machine (`local`).
Begin  with `hardware.py`.
May import  `common`, `trace`, `plan`.

`mk.hardware("2x-titan-rtx")` makes a machine of the catalogue; a `Hardware` of your own is made
of a `Device` and a `Link`, whose rates are by `Kind` of communication.
"""

from mpkit.devices.hardware import Device, Hardware, Link
from mpkit.trace import Kind

__all__ = ["Device", "Hardware", "Kind", "Link"]
