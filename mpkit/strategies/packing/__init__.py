"""How what is sent to ranks is pickled, and what goes with it.

packing         objects from notebooks by value, and special cases for objects from libraries
world           what the launching process has set for all of its code; patches of torch are named
edited_modules  the user's modules that were edited since their import
"""
