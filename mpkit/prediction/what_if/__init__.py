"""A run's step after changes, from its own trace: another schedule, link, device, batch or plan."""
