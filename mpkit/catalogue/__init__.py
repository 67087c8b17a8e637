"""The catalogue: machines by name."""

from __future__ import annotations

from difflib import get_close_matches

from mpkit.devices import Device, Hardware, Link

__all__ = ["hardware", "list_hardware"]


def _cpu() -> Hardware:
    core = Device("CPU core", {"float32": 50e9, "float64": 25e9}, bandwidth=10e9, host=10e9)
    return Hardware("cpu", core, Link("loopback", latency=20e-6, bandwidth=10e9), per_node=1 << 30)


_MACHINES = {"cpu": _cpu}


def hardware(name: str | Hardware) -> Hardware:
    """The machine of that name; a `Hardware` is returned as it is.

    Raises:
        ValueError: there is none of that name.
    """
    if isinstance(name, Hardware):
        return name
    if name not in _MACHINES:
        near = get_close_matches(str(name), _MACHINES, 3, 0.3) or list(_MACHINES)
        raise ValueError(f"There is no hardware {name!r}. The nearest: {', '.join(map(repr, near))}.")
    return _MACHINES[name]()


def list_hardware() -> list[str]:
    """The names of the catalogue."""
    return list(_MACHINES)
