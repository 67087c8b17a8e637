"""mk.explore: two schedules side by side, with sliders and an editor."""
