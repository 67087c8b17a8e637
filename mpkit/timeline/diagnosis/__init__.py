"""Why a step takes as long as it does: rules over one step, each of which plays the step again without its cause.

evidence        the step, its graph, who waits for whom, its machine and plan
findings.toml   what each kind of finding says
rules           all rules in order, and `diagnose`
uneven          stragglers, stages of unlike size, the bubble of a schedule with few micro-batches
without         loading, copies, gaps, synchronizing calls; slow links, and communication that nothing hides

A rule names and explains its thresholds. What a general rule finds does not count what a special one has explained.
"""
