"""The exercises: a package a family, a module an exercise; see docs/teaching.md for how to add one."""
