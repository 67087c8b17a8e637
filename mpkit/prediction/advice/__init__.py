"""Advice: which plan, with reasons.

offers     what a software stack can do
space      every plan that is possible
prices     layouts as arrays, and what they are priced for
screening  the memory and about the time of all of them
search     those that fit, by time, cost or devices: memory first
advice     what was found, ranked
reasons    in words: the best plan of each family, and why not another plan
rules      the guides' rules, evaluated with this model's numbers
"""
