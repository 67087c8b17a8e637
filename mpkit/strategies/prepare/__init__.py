"""Everything that is checked and counted before a rank starts."""
