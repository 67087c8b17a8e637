"""Communication between ranks: collectives and messages, which are recorded and compared across ranks."""
