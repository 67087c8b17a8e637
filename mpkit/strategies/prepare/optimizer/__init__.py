"""Whether an optimizer can work on parts of the model, which is known or tried."""
