"""Helpers for every other folder: answers to mistakes, strings made safe to print, files written whole."""
