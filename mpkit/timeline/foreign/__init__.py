"""Traces of torch.profiler (Kineto) of one or many ranks become a Trace like any other."""
