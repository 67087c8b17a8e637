"""Why a step takes as long as it does: rules over one step, each of which plays the step again without its cause.

evidence        the step, its graph, who waits for whom, its machine and plan
findings.toml   what each kind of finding says
rules           all rules in order, and `diagnose`
stragglers      ranks that are slower than those that do the same, or late, alone or together
without         loading, copies, gaps, synchronizing calls
communication   slow links, and what nothing hides
stages          stages of unlike size; the bubble of a schedule with few micro-batches
bubble_words    the bubble beside theory, in a sentence

A rule names and explains its thresholds. What a general rule finds does not count what a special one has explained.
"""
