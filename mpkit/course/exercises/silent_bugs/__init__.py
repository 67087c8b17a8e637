"""Silent-bug lab.

Here are four programs. Each runs, its loss falls, and nobody complains; but each trains something other than it
should. The only way to know is to train the same model serially, on one device with the whole batch, and to compare.
That is what `mk.beside_serial` does: losses and weights, step by step. At which step do they part, and which weights
part first? That tells where to look.
"""

__all__ = ["PLACE", "TITLE"]

TITLE = "Silent-bug lab"
PLACE = 8
