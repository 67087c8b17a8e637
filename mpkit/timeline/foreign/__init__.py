"""Traces of other tools: torch.profiler's (Kineto) of one or many ranks become a Trace like any other."""
