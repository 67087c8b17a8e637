"""The plan that a program ran, inferred from its trace, with the evidence for it."""
