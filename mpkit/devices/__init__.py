"""Devices, the links between them, and what operations cost there.

`mk.hardware("2x-titan-rtx")` makes a machine of the catalogue; a `Hardware` of your own is made
of a `Device` and a `Link`.
"""

from mpkit.devices.hardware import Device, Hardware, Link

__all__ = ["Device", "Hardware", "Link"]
