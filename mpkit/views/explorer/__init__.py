"""mk.explore: two schedules side by side, with sliders, an editor, and a button that runs them on real ranks."""
