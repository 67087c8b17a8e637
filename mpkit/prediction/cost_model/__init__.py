"""Predicting a step's time and memory on any hardware, from the sizes of a model."""
