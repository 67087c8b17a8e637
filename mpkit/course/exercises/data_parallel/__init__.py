"""Data parallel.

Every rank has a copy of the model and a part of each batch. What remains is to agree on the gradient: first with many
messages, then with few, at last while the backward is still under way. In the end each of your answers trains exactly
as one device does.
"""

TITLE = "Data parallel"
PLACE = 2
