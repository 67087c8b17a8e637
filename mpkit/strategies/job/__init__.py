"""What a rank is given: the job of a training, and the samples of each step."""
