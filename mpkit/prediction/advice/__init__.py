"""Advice: which plan, with reasons.

offers     what a software stack can do
space      every plan that is possible
prices     the memory and the time of each plan
search     those that fit, by time, cost or devices: memory first
advice     what was found, ranked; why not another plan; the same on other hardware
rules      the guides' rules, evaluated with this model's numbers
"""
