"""Data parallel.

Every rank has a copy of the model and a part of each batch. The ranks only have to agree on the gradient: first with
many messages, then with few, and at last while the backward is still running. In the end, each of your answers trains
exactly as one device does.
"""

TITLE = "Data parallel"
PLACE = 2
