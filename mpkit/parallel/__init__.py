"""The strategies, one family a file, and what they stand on: `comm`, through which every byte goes."""
