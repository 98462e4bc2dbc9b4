"""The HTTP face of generation, which OpenAI's clients speak, in front of the ranks that hold the model."""
