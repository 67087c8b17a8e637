"""What a wrong answer is told: the mistake that shows, or how its results are related to the right ones."""
