"""Detecting and explaining ranks that wait.

waits    what each rank is doing, and calls that no peer will ever answer
hang     whether the ranks wait for each other forever, and for whom they wait, in words
"""
