"""Mixtures of experts: on one rank, divided over ranks, and what keeps their
experts equally busy.
"""
