"""What is said of parameters that get no gradient, or several in one backward."""

from __future__ import annotations

from mpkit.errors import MpkitError

__all__ = ["arrived_late", "unused_error", "unused_message"]


def unused_error(names: list[str], allow: str = "unused='allow' in the Plan") -> MpkitError:
    """Return the error for parameters without a gradient, with what would allow that."""
    return MpkitError(unused_message(names, "in this step", "on this rank", allow))


def unused_message(
    names: list[str],
    when: str = "in any step",
    where: str = "for any sample",
    allow: str = "unused='allow' in the Plan",
) -> str:
    """Return the message about parameters without a gradient."""
    shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    return (
        f"No gradient came for {shown} {when}: the loss does not depend on "
        f"{'it' if len(names) == 1 else 'them'} {where}, and the other ranks wait for the sum. If that is meant, "
        f"{allow}; if not, use them in the forward, or freeze them: parameter.requires_grad_(False)."
    )


def arrived_late(name: str) -> MpkitError:
    """Return the error for a parameter that got another gradient when the sum over ranks was under way."""
    return MpkitError(
        f"{name} got another gradient in the same backward, when its first one was being summed over ranks already. A "
        "checkpoint that runs a backward within the backward does that, around a block that is used several times: "
        "torch.utils.checkpoint.checkpoint(..., use_reentrant=False), or Plan(recompute='full') in its place"
    )
