"""Everything that follows from a result or a model without running it: placement, cuts, schedules, comparison."""
