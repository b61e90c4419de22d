"""A trained model out in the world: what it takes and what it answers, predictions, and plain copies of it."""
