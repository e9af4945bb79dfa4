"""Other people's weights: reading them in, writing ours out."""
