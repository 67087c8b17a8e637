"""Advice: which plan, with reasons.

space      every plan that is possible, and what a software stack can do
search     those that fit, by time, cost or devices: memory first
advice     what was found, ranked
reasons    in words: the best plan of each family, and why not another plan
rules      the guides' rules, evaluated with this model's numbers
"""
